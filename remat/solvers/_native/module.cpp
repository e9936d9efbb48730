// The kernel as a Python module: sequences of 64-bit integers in, plain values out. The interpreter lock
// is released while the kernel runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "anneal.hpp"
#include "frontier.hpp"
#include "graph_core.hpp"
#include "knapsack.hpp"
#include "relaxation.hpp"

namespace py = pybind11;

namespace {

// Converts a tuple or list of ints in a few nanoseconds each; pybind11's conversion takes longer than the
// solver.
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
    out = remat::Solver(w, v, capacity, {seconds, work, states}).run();
  }
  return py::make_tuple(out.saved, out.value, out.bound, out.optimal, out.by_clock);
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

// Nodes come as columns; `sources` and `flows` hold the inputs of all nodes one after the other,
// node v's from `starts[v]` up to `starts[v + 1]`.
remat::GraphCore graph_core(const py::object& sizes, const py::object& save_losses,
                            const py::object& recompute_losses, const py::object& flags,
                            const py::object& starts, const py::object& sources, const py::object& flows,
                            remat::i64 price) {
  const auto size = integers(sizes), save = integers(save_losses), again = integers(recompute_losses);
  const auto flag = integers(flags), start = integers(starts), source = integers(sources), flow = integers(flows);
  const std::size_t n = size.size();
  if (save.size() != n || again.size() != n || flag.size() != n || start.size() != n + 1 ||
      source.size() != flow.size()) {
    throw py::value_error("the columns of the graph differ in length");
  }
  remat::GraphCore core;
  core.price = price;
  core.nodes.resize(n);
  for (std::size_t v = 0; v < n; ++v) {
    auto& node = core.nodes[v];
    node.size = size[v];
    node.save_loss = save[v];
    node.recompute_loss = again[v];
    node.savable = flag[v] & 1;
    node.recomputable = flag[v] & 2;
    node.needed = flag[v] & 4;
    for (auto e = start[v]; e < start[v + 1]; ++e) {
      const auto at = static_cast<std::size_t>(e);
      if (at >= source.size() || source[at] < 0 || source[at] >= static_cast<remat::i64>(v)) {
        throw py::value_error("an input of the graph does not come before its reader");
      }
      node.inputs.emplace_back(static_cast<int>(source[at]), flow[at]);
    }
  }
  return core;
}

// Doubles hold integers up to 2^53 exactly; Python sees to it that sums stay below.
std::vector<double> amounts(const py::object& sequence) {
  const auto numbers = integers(sequence);
  return std::vector<double>(numbers.begin(), numbers.end());
}

std::vector<int> indices(const py::object& sequence, std::size_t below) {
  const auto numbers = integers(sequence);
  for (const auto i : numbers) {
    if (i < 0 || static_cast<std::size_t>(i) >= below) throw py::value_error("an index of the graph is out of range");
  }
  return std::vector<int>(numbers.begin(), numbers.end());
}

// `reads` holds the values that all nodes read one after the other, node v's from `starts[v]` on.
remat::StepGraph step_graph(const py::object& cost, const py::object& extra, const py::object& once,
                            const py::object& starts, const py::object& reads, const py::object& maker,
                            const py::object& size) {
  remat::StepGraph g;
  g.cost = amounts(cost);
  g.extra = amounts(extra);
  g.once = integers(once);
  g.size = amounts(size);
  const std::size_t n = g.cost.size(), values = g.size.size();
  g.maker = indices(maker, n);
  const auto start = integers(starts);
  const auto read = indices(reads, values);
  if (g.extra.size() != n || g.once.size() != n || g.maker.size() != values || start.size() != n + 1) {
    throw py::value_error("the columns of the step differ in length");
  }
  g.makes.resize(n);
  g.reads.resize(n);
  g.readers.resize(values);
  for (std::size_t x = 0; x < values; ++x) g.makes[static_cast<std::size_t>(g.maker[x])].push_back(static_cast<int>(x));
  for (std::size_t v = 0; v < n; ++v) {
    for (auto e = start[v]; e < start[v + 1]; ++e) {
      if (e < 0 || static_cast<std::size_t>(e) >= read.size()) throw py::value_error("an index of the graph is out of range");
      const int x = read[static_cast<std::size_t>(e)];
      g.reads[v].push_back(x);
      g.readers[static_cast<std::size_t>(x)].push_back(static_cast<int>(v));
    }
  }
  return g;
}

// One search for each row of `turns`, two at a time; the answers do not depend on which ends first.
py::list anneal(const remat::StepGraph& graph, const py::object& start, remat::i64 capacity,
                const std::vector<std::array<double, 7>>& turns, double seconds) {
  const auto first = indices(start, static_cast<std::size_t>(graph.nodes()));
  std::vector<remat::Annealer::Result> found(turns.size());
  std::atomic<bool> stop{false};
  std::atomic<int> running{2};
  bool interrupted = false;
  {
    py::gil_scoped_release unlocked;
    const auto work = [&](std::size_t from) {
      for (std::size_t k = from; k < turns.size() && !stop; k += 2) {
        const auto& t = turns[k];
        remat::Annealer search(graph, static_cast<double>(capacity), static_cast<std::uint64_t>(t[0]));
        found[k] = search.run(first, {static_cast<remat::i64>(t[1]), seconds, t[2], t[3], t[4], t[5], t[6]}, stop);
      }
      --running;
    };
    std::thread one(work, 0), other(work, 1);
    // This thread looks out for an interrupt.
    for (int naps = 0; running > 0; ++naps) {
      std::this_thread::sleep_for(std::chrono::milliseconds(naps < 20 ? 1 : 20));
      if (naps % 5 == 4 && !interrupted) {
        py::gil_scoped_acquire locked;
        interrupted = PyErr_CheckSignals() != 0;
        if (interrupted) stop = true;
      }
    }
    one.join();
    other.join();
  }
  if (interrupted) throw py::error_already_set();
  py::list answers;
  for (const auto& r : found) answers.append(py::make_tuple(r.feasible, r.by_clock, r.cost, r.peak, r.sequence));
  return answers;
}

}  // namespace

PYBIND11_MODULE(_kernel, m) {
  m.doc() = "Exact 0/1 knapsack and its Pareto frontier, in 64-bit integers.";
  m.def("solve", &solve, py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("seconds"),
        py::arg("work"), py::arg("states"),
        "(saved, value, bound, optimal, by_clock); seconds 0: no clock; work and states are counted");
  m.def("relax", &relax, py::arg("weights"), py::arg("values"), py::arg("capacity"),
        "(order, bound, saved, value): the linear relaxation and a greedy rounding of it");
  py::class_<remat::GraphCore>(m, "GraphCore")
      .def(py::init(&graph_core), py::arg("sizes"), py::arg("save_losses"), py::arg("recompute_losses"),
           py::arg("flags"), py::arg("starts"), py::arg("sources"), py::arg("flows"), py::arg("price"))
      .def(
          "run",
          [](const remat::GraphCore& core, remat::i64 capacity, remat::i64 limit, remat::i64 work, std::size_t most,
             double seconds) {
            remat::GraphCore::Result out;
            {
              py::gil_scoped_release unlocked;
              out = core.run(capacity, limit, work, most, seconds);
            }
            return py::make_tuple(out.found, out.complete, out.bytes, out.loss, out.saved, out.work, out.by_clock);
          },
          py::arg("capacity"), py::arg("limit"), py::arg("work"), py::arg("most"),
          py::arg("seconds"),
          "(found, complete, bytes, loss, saved, work, by_clock): the cheapest decision that loses at most limit")
      .def(
          "bound",
          [](const remat::GraphCore& core, remat::i64 capacity, remat::i64 limit, remat::i64 modulus, remat::i64 work,
             double seconds) {
            if (modulus < 1) throw py::value_error("the modulus is below 1");
            remat::GraphCore::Result out;
            {
              py::gil_scoped_release unlocked;
              out = core.bound(capacity, limit, modulus, work, seconds);
            }
            return py::make_tuple(out.complete, out.loss, out.by_clock);
          },
          py::arg("capacity"), py::arg("limit"), py::arg("modulus"), py::arg("work"), py::arg("seconds"),
          "(complete, loss, by_clock): every decision loses at least loss, unused bytes included");
  py::class_<remat::StepGraph>(m, "StepGraph")
      .def(py::init(&step_graph), py::arg("cost"), py::arg("extra"), py::arg("once"), py::arg("starts"),
           py::arg("reads"), py::arg("maker"), py::arg("size"))
      .def("anneal", &anneal, py::arg("start"), py::arg("capacity"), py::arg("turns"), py::arg("seconds"),
           "a tuple (feasible, by_clock, cost, peak, sequence) for each turn (seed, moves, hot, cold, wide, narrow, "
           "price)");
  py::class_<remat::Frontier>(m, "Frontier")
      .def(py::init([](const py::object& weights, const py::object& values, remat::i64 capacity,
                       std::size_t most) {
             const auto w = integers(weights), v = integers(values);
             py::gil_scoped_release unlocked;
             return std::make_unique<remat::Frontier>(w, v, capacity, most);
           }),
           py::arg("weights"), py::arg("values"), py::arg("capacity"), py::arg("most"))
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
