// Python's door to the kernel: plain lists of 64-bit integers in, plain values out, the interpreter
// lock released in between.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "frontier.hpp"
#include "knapsack.hpp"

namespace py = pybind11;

namespace {

py::tuple solve(const std::vector<remat::i64>& weights, const std::vector<remat::i64>& values,
                remat::i64 capacity, double seconds, remat::i64 work, std::size_t states) {
  remat::Outcome out;
  {
    py::gil_scoped_release unlocked;
    remat::Limits limits;
    limits.seconds = seconds;
    limits.work = work;
    limits.states = states;
    out = remat::Solver(weights, values, capacity, limits).run();
  }
  return py::make_tuple(out.saved, out.value, out.bound, out.optimal, out.by_clock, out.work);
}

}  // namespace

PYBIND11_MODULE(_kernel, m) {
  m.doc() = "Exact 0/1 knapsack and its Pareto frontier, in 64-bit integers.";
  m.def("solve", &solve, py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("seconds"),
        py::arg("work"), py::arg("states"),
        "(saved, value, bound, optimal, by_clock, work); seconds 0: no clock; work and states are counted");
  py::class_<remat::Frontier>(m, "Frontier")
      .def(py::init([](const std::vector<remat::i64>& weights, const std::vector<remat::i64>& values,
                       remat::i64 capacity, std::size_t most) {
             py::gil_scoped_release unlocked;
             return std::make_unique<remat::Frontier>(weights, values, capacity, most);
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
