// The kernel as a Python module: sequences of 64-bit integers in, plain values out. border.hpp checks the values of
// the arguments. The interpreter lock is released while the kernel runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <thread>

#include "anneal.hpp"
#include "border.hpp"
#include "frontier.hpp"
#include "graph_core.hpp"
#include "knapsack.hpp"

namespace py = pybind11;

namespace {

namespace border = remat::border;
using border::Column;
using remat::i64;

// Wraps a class for Python. Python can create an object by `__new__` alone, without `__init__`. pybind11 would
// then allocate uninitialised memory, so `operator new` raises an error instead.
template <class T>
struct Made : T {
  using T::T;
  explicit Made(T&& made) : T(std::move(made)) {}
  static void* operator new(std::size_t) {
    throw py::type_error("the object was made by __new__ alone; expected a call of its class");
  }
  static void operator delete(void* memory) { ::operator delete(memory); }
};

using GraphCore = Made<remat::GraphCore>;
using ScheduleGraph = Made<remat::ScheduleGraph>;
using Frontier = Made<remat::Frontier>;

py::tuple solve(const Column& weights, const Column& values, i64 capacity, double seconds, i64 work, i64 states) {
  const i64 room = border::knapsack(weights, values, capacity, border::kLargestSolved);
  const remat::Limits limits{border::seconds(seconds), border::integer(work, "work"),
                             static_cast<std::size_t>(border::integer(states, "states"))};
  remat::Outcome out;
  {
    py::gil_scoped_release unlocked;
    out = remat::Solver(weights, values, room, limits).run();
  }
  return py::make_tuple(out.saved, out.value, out.bound, out.optimal, out.by_clock);
}

std::unique_ptr<GraphCore> graph_core(const Column& sizes, const Column& save_losses, const Column& recompute_losses,
                                      const Column& flags, const Column& starts, const Column& sources,
                                      const Column& flows, i64 price) {
  return std::unique_ptr<GraphCore>(::new GraphCore(
      border::graph_core(sizes, save_losses, recompute_losses, flags, starts, sources, flows,
                         border::integer(price, "price"))));
}

py::tuple run(const GraphCore& core, i64 capacity, i64 limit, i64 work, i64 most, double seconds) {
  const i64 room = std::min(border::integer(capacity, "capacity"), core.bytes());
  const i64 loss = border::integer(limit, "limit"), units = border::integer(work, "work");
  const auto prefixes = static_cast<std::size_t>(border::integer(most, "most"));
  const double clock = border::seconds(seconds);
  border::product_fits(core.price, room, 0, "price * bytes");
  remat::GraphCore::Result out;
  {
    py::gil_scoped_release unlocked;
    out = core.run(room, loss, units, prefixes, clock);
  }
  return py::make_tuple(out.found, out.complete, out.bytes, out.loss, out.saved, out.work, out.by_clock);
}

std::unique_ptr<ScheduleGraph> schedule_graph(const Column& cost, const Column& extra, const Column& once,
                                              const Column& starts, const Column& reads, const Column& maker,
                                              const Column& size) {
  return std::unique_ptr<ScheduleGraph>(
      ::new ScheduleGraph(border::schedule_graph(cost, extra, once, starts, reads, maker, size)));
}

// Run one search for each turn, two at a time. The answers do not depend on which search ends first. An exception
// in one search ends all searches and is raised here.
py::list anneal(const ScheduleGraph& graph, const Column& start, i64 capacity, const std::vector<border::Row>& turns,
                double seconds) {
  const auto first = border::start_of(graph, start);
  const auto room = static_cast<double>(border::integer(capacity, "capacity", -border::kLargest));
  const double clock = border::seconds(seconds);
  std::vector<remat::Annealer::Limits> rows;
  for (const border::Row& row : turns) rows.push_back(border::limits_of(row, clock));
  std::vector<remat::Annealer::Result> found(rows.size());
  std::atomic<bool> stop{false};
  std::atomic<std::size_t> next{0};
  std::atomic<int> ready{0};
  std::atomic<bool> begun{false};
  std::vector<std::future<void>> searches;
  searches.reserve(2);
  bool interrupted = false;
  {
    py::gil_scoped_release unlocked;
    const auto work = [&] {
      // A thread allocates its exception data at first use, and glibc ends the process if that allocation
      // fails. So each thread allocates its data before any search takes memory.
      static_cast<void>(std::current_exception());
      for (++ready; !begun; std::this_thread::yield()) {
      }
      try {
        for (std::size_t k = next++; k < rows.size() && !stop; k = next++) {
          found[k] = remat::Annealer(graph, room).run(first, rows[k], stop);
        }
      } catch (...) {
        stop = true;
        throw;
      }
    };
    try {
      while (searches.size() < 2) searches.push_back(std::async(std::launch::async, work));
    } catch (...) {  // no resources for another thread
    }
    while (ready < static_cast<int>(searches.size())) std::this_thread::yield();
    begun = true;
    if (searches.empty()) work();
    int naps = 0;
    for (const std::future<void>& search : searches) {
      // This thread checks for an interrupt.
      while (search.wait_for(std::chrono::milliseconds(naps < 20 ? 1 : 20)) != std::future_status::ready) {
        if (++naps % 5 != 0 || interrupted) continue;
        py::gil_scoped_acquire locked;
        interrupted = PyErr_CheckSignals() != 0;
        if (interrupted) stop = true;
      }
    }
  }
  if (interrupted) throw py::error_already_set();
  for (std::future<void>& search : searches) search.get();
  py::list answers;
  for (const auto& r : found) answers.append(py::make_tuple(r.feasible, r.by_clock, r.cost, r.peak, r.sequence));
  return answers;
}

std::unique_ptr<Frontier> frontier(const Column& weights, const Column& values, i64 capacity, i64 most) {
  const i64 room = border::knapsack(weights, values, capacity, border::kLargest);
  const auto points = static_cast<std::size_t>(border::integer(most, "most"));
  py::gil_scoped_release unlocked;
  return std::unique_ptr<Frontier>(::new Frontier(weights, values, room, points));
}

std::vector<std::int32_t> items(const Frontier& f, i64 i) {
  return f.items(static_cast<std::size_t>(border::integer(i, "i", 0, static_cast<i64>(f.points().size()) - 1)));
}

py::tuple points(const Frontier& f) {
  Column weights, values;
  for (const remat::State& point : f.points()) {
    weights.push_back(point.w);
    values.push_back(point.p);
  }
  const auto array = [](const Column& numbers) {
    return py::array_t<i64>(static_cast<py::ssize_t>(numbers.size()), numbers.data());
  };
  return py::make_tuple(array(weights), array(values));
}

}  // namespace

// The stub `_kernel.pyi` says what the functions return.
PYBIND11_MODULE(_kernel, m) {
  remat::heed = [] {
    py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  m.doc() = "Exact 0/1 knapsack and its Pareto frontier, graph problems and schedule problems, in 64-bit integers.";
  m.def("solve", &solve, py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("seconds"),
        py::arg("work"), py::arg("states"));
  py::class_<GraphCore>(m, "GraphCore")
      .def(py::init(&graph_core), py::arg("sizes"), py::arg("save_losses"), py::arg("recompute_losses"),
           py::arg("flags"), py::arg("starts"), py::arg("sources"), py::arg("flows"), py::arg("price"))
      .def("run", &run, py::arg("capacity"), py::arg("limit"), py::arg("work"), py::arg("most"), py::arg("seconds"));
  py::class_<ScheduleGraph>(m, "ScheduleGraph")
      .def(py::init(&schedule_graph), py::arg("cost"), py::arg("extra"), py::arg("once"), py::arg("starts"),
           py::arg("reads"), py::arg("maker"), py::arg("size"))
      .def("anneal", &anneal, py::arg("start"), py::arg("capacity"), py::arg("turns"), py::arg("seconds"));
  py::class_<Frontier>(m, "Frontier")
      .def(py::init(&frontier), py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("most"))
      .def("items", &items, py::arg("i"))
      .def("points", &points)
      .def_property_readonly("tolerance", [](const Frontier& f) { return f.tolerance(); });
}
