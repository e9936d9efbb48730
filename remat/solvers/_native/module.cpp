// Python's door to the kernel: plain lists of 64-bit integers in, plain values out, the interpreter
// lock released in between.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "frontier.hpp"
#include "knapsack.hpp"
#include "relaxation.hpp"

namespace py = pybind11;

namespace {

// A tuple or list of ints, at a few nanoseconds each: the general conversion would take longer than
// solving does.
std::vector<remat::i64> integers(const py::handle& sequence) {
  const auto fast = py::reinterpret_steal<py::object>(
      PySequence_Fast(sequence.ptr(), "expected a sequence of integers"));
  if (!fast) throw py::error_already_set();
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  std::vector<remat::i64> numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] = PyLong_AsLongLong(items[i]);
    if (numbers[i] == -1 && PyErr_Occurred()) throw py::error_already_set();
  }
  return numbers;
}

py::tuple solve(const py::object& weights, const py::object& values, remat::i64 capacity,
                double seconds, remat::i64 work, std::size_t states) {
  const auto w = integers(weights), v = integers(values);
  remat::Outcome out;
  {
    py::gil_scoped_release unlocked;
    remat::Limits limits;
    limits.seconds = seconds;
    limits.work = work;
    limits.states = states;
    out = remat::Solver(w, v, capacity, limits).run();
  }
  return py::make_tuple(out.saved, out.value, out.bound, out.optimal, out.by_clock, out.work);
}

py::tuple relax(const py::object& weights, const py::object& values, remat::i64 capacity) {
  const auto w = integers(weights), v = integers(values);
  remat::Relaxation out;
  {
    py::gil_scoped_release unlocked;
    out = remat::relax(w, v, capacity);
  }
  return py::make_tuple(out.order, out.bound, out.saved, out.value);
}

}  // namespace

PYBIND11_MODULE(_kernel, m) {
  m.doc() = "Exact 0/1 knapsack and its Pareto frontier, in 64-bit integers.";
  m.def("solve", &solve, py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("seconds"),
        py::arg("work"), py::arg("states"),
        "(saved, value, bound, optimal, by_clock, work); seconds 0: no clock; work and states are counted");
  m.def("relax", &relax, py::arg("weights"), py::arg("values"), py::arg("capacity"),
        "(order, bound, saved, value): the linear relaxation and a greedy rounding of it");
  py::class_<remat::Frontier>(m, "Frontier")
      .def(py::init([](const py::object& weights, const py::object& values, remat::i64 capacity,
                       std::size_t most) {
             const auto w = integers(weights), v = integers(values);
             py::gil_scoped_release unlocked;
             return std::make_unique<remat::Frontier>(w, v, capacity, most);
           }),
           py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("most"))
      .def("__len__", &remat::Frontier::size)
      .def("weight", &remat::Frontier::weight)
      .def("value", &remat::Frontier::value)
      .def("items", &remat::Frontier::items)
      .def("points",
           [](const remat::Frontier& f) {
             const auto n = static_cast<py::ssize_t>(f.size());
             py::array_t<remat::i64> weights(n), values(n);
             auto w = weights.mutable_unchecked<1>(), v = values.mutable_unchecked<1>();
             for (py::ssize_t i = 0; i < n; ++i) {
               w(i) = f.weight(static_cast<std::size_t>(i));
               v(i) = f.value(static_cast<std::size_t>(i));
             }
             return py::make_tuple(weights, values);
           })
      .def_property_readonly("tolerance", &remat::Frontier::tolerance);
}
