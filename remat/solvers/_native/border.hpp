// Checks of all arguments from Python before the kernel uses them: types, lengths, indices, signs and sums.
// An error message names the argument, its value, and the expected value.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "anneal.hpp"
#include "graph_core.hpp"
#include "integers.hpp"

namespace remat::border {

namespace py = pybind11;

constexpr i64 kLargest = std::numeric_limits<i64>::max();
// Up to this sum of weights or values, no product or shift in `Solver` overflows.
constexpr i64 kLargestSolved = i64{1} << 60;
// Up to this sum, doubles hold integers exactly.
constexpr i64 kLargestExact = i64{1} << 53;
// Positions are 32-bit integers, and the sum of two positions must fit.
constexpr std::size_t kMostEntries = std::size_t{1} << 30;

inline std::string text(i64 number) {
  for (const int bits : {53, 60}) {
    if (number == i64{1} << bits) return "2**" + std::to_string(bits);
  }
  return number == kLargest ? "2**63 - 1" : std::to_string(number);
}

inline std::string at(const std::string& name, std::size_t i) { return name + "[" + std::to_string(i) + "]"; }

// If Python has just raised a TypeError, raise one that names the argument instead. Any other error comes
// from the argument's own code and is passed on.
[[noreturn]] inline void wrong_type(const std::string& name, const py::handle& got, const char* expected) {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
  PyErr_Clear();
  throw py::type_error(name + " is of type " + Py_TYPE(got.ptr())->tp_name + "; expected " + expected);
}

// `name` builds the argument's name; it is called only for an error message.
template <class Name>
i64 integer(const py::handle& number, i64 low, i64 high, const Name& name) {
  int beyond = 0;
  const i64 out = PyLong_AsLongLongAndOverflow(number.ptr(), &beyond);
  if (out == -1 && PyErr_Occurred()) wrong_type(name(), number, "an integer");
  if (beyond == 0 && low <= out && out <= high) return out;
  const std::string expected =
      high < low ? "; expected none, as there are none" : "; expected an integer from " + text(low) + " to " + text(high);
  if (beyond != 0) throw std::overflow_error(name() + " does not fit 64 bits" + expected);
  throw py::value_error(name() + " is " + std::to_string(out) + expected);
}

inline i64 integer(const py::handle& number, const char* name, i64 low = 0, i64 high = kLargest) {
  return integer(number, low, high, [&] { return std::string(name); });
}

// Read a finite number of at least 0 (if `zero` is true) or above 0 (if `zero` is false).
template <class Name>
double real(const py::handle& number, bool zero, const Name& name) {
  double out = PyFloat_AsDouble(number.ptr());
  if (out == -1 && PyErr_ExceptionMatches(PyExc_OverflowError)) {  // an int too large for a double
    PyErr_Clear();
    out = std::numeric_limits<double>::infinity();
  }
  if (out == -1 && PyErr_Occurred()) wrong_type(name(), number, "a number");
  if (std::isfinite(out) && (zero ? out >= 0 : out > 0)) return out;
  throw py::value_error(name() + " is " + std::to_string(out) + "; expected a finite number " +
                        (zero ? "of 0 or more" : "above 0"));
}

inline double seconds(const py::handle& number) {
  return real(number, true, [] { return std::string("seconds"); });
}

// Return a copy of a sequence as a tuple. Reading an entry may call its `__index__`, which could change the sequence.
inline py::tuple entries(const py::handle& sequence, const std::string& name) {
  if (!PySequence_Check(sequence.ptr())) wrong_type(name, sequence, "a sequence");
  auto out = py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence.ptr()));
  if (!out) throw py::error_already_set();
  if (out.size() > kMostEntries) {
    throw py::value_error(name + " has " + std::to_string(out.size()) + " entries; expected at most " +
                          std::to_string(kMostEntries));
  }
  return out;
}

inline std::vector<i64> integers(const py::handle& sequence, const char* name, i64 low = 0, i64 high = kLargest) {
  const py::tuple items = entries(sequence, name);
  std::vector<i64> numbers(items.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), static_cast<py::ssize_t>(i));
    numbers[i] = integer(item, low, high, [&] { return at(name, i); });
  }
  return numbers;
}

inline std::vector<int> indices(const py::handle& sequence, const char* name, std::size_t below) {
  const auto numbers = integers(sequence, name, 0, static_cast<i64>(below) - 1);
  return std::vector<int>(numbers.begin(), numbers.end());
}

inline void has_length(std::size_t length, const char* name, std::size_t expected, const std::string& each) {
  if (length == expected) return;
  throw py::value_error(std::string(name) + " has " + std::to_string(length) + " entries; expected " +
                        std::to_string(expected) + ", " + each);
}

// Return `before` plus the sum of the numbers; refuse a result above `most`.
inline i64 sum(const std::vector<i64>& numbers, const std::string& name, i64 most, i64 before = 0) {
  i64 total = before;
  for (const i64 number : numbers) {
    if (number > most - total) {
      throw std::overflow_error(name + " sum to more than " + text(most) + "; expected at most that: use a coarser unit");
    }
    total += number;
  }
  return total;
}

inline void product_fits(i64 price, i64 bytes, i64 besides, const std::string& name) {
  if (static_cast<i128>(price) * bytes + besides < static_cast<i128>(kLargest)) return;
  throw std::overflow_error(name + " is " + text(price) + " * " + text(bytes) + " + " + text(besides) +
                            "; expected less than 2**63 - 1: use a coarser unit");
}

// ---- knapsacks -----------------------------------------------------------------------------------

struct Knapsack {
  std::vector<i64> weights, values;
  i64 capacity;  // at most the total weight; a larger capacity changes nothing

  Knapsack(const py::handle& given_weights, const py::handle& given_values, const py::handle& given_capacity, i64 most)
      : weights(integers(given_weights, "weights")), values(integers(given_values, "values")) {
    has_length(values.size(), "values", weights.size(), "one for each weight");
    capacity = std::min(integer(given_capacity, "capacity"), sum(weights, "weights", most));
    sum(values, "values", most);
  }
};

// ---- graphs --------------------------------------------------------------------------------------

// The offset of each node's inputs in a column that holds the inputs of all nodes one after the other.
inline std::vector<i64> row_starts(const py::handle& starts, std::size_t nodes, std::size_t entries_of_all) {
  const auto numbers = integers(starts, "starts", 0, static_cast<i64>(entries_of_all));
  has_length(numbers.size(), "starts", nodes + 1, "one for each node and the end");
  for (std::size_t v = 0; v <= nodes; ++v) {
    const i64 low = v == 0 ? 0 : numbers[v - 1];
    if (v == 0 ? numbers[v] != 0 : numbers[v] < low) {
      throw py::value_error(at("starts", v) + " is " + std::to_string(numbers[v]) + "; expected " +
                            (v == 0 ? "0" : std::to_string(low) + " or more, as the one before"));
    }
  }
  if (numbers[nodes] != static_cast<i64>(entries_of_all)) {
    throw py::value_error(at("starts", nodes) + " is " + std::to_string(numbers[nodes]) + "; expected " +
                          std::to_string(entries_of_all) + ", the number of inputs of all nodes");
  }
  return numbers;
}

// The arguments are columns with one entry per node, except for `sources` and `flows`. These two hold the
// inputs of all nodes one after the other: those of node v from `starts[v]` up to `starts[v + 1]`.
inline GraphCore graph_core(const py::handle& sizes, const py::handle& save_losses, const py::handle& recompute_losses,
                            const py::handle& flags, const py::handle& starts, const py::handle& sources,
                            const py::handle& flows, const py::handle& price) {
  const auto size = integers(sizes, "sizes"), save = integers(save_losses, "save_losses");
  const auto again = integers(recompute_losses, "recompute_losses"), flag = integers(flags, "flags", 0, 7);
  const std::size_t n = size.size();
  has_length(save.size(), "save_losses", n, "one for each size");
  has_length(again.size(), "recompute_losses", n, "one for each size");
  has_length(flag.size(), "flags", n, "one for each size");
  const auto source = indices(sources, "sources", n);
  const auto flow = integers(flows, "flows");
  has_length(flow.size(), "flows", source.size(), "one for each of sources");
  const auto start = row_starts(starts, n, source.size());
  sum(size, "sizes", kLargest);
  GraphCore core;
  core.price = integer(price, "price");
  core.nodes.resize(n);
  for (std::size_t v = 0; v < n; ++v) {
    auto& node = core.nodes[v];
    node.size = size[v];
    node.save_loss = save[v];
    node.recompute_loss = again[v];
    node.savable = flag[v] & 1;
    node.recomputable = flag[v] & 2;
    node.needed = flag[v] & 4;
    const auto from = static_cast<std::size_t>(start[v]), to = static_cast<std::size_t>(start[v + 1]);
    i64 lost = save[v];
    for (std::size_t e = from; e < to; ++e) {
      if (source[e] >= static_cast<i64>(v)) {
        throw py::value_error(at("sources", e) + " is " + std::to_string(source[e]) + "; expected a node before " +
                              std::to_string(v) + ", which reads it");
      }
      lost = sum({flow[e]}, "what node " + std::to_string(v) + " and its inputs lose", kLargest, lost);
      node.inputs.emplace_back(source[e], flow[e]);
    }
  }
  return core;
}

// `reads` lists the values that the nodes read, for one node after the other: those of node v start at
// `starts[v]`.
inline StepGraph step_graph(const py::handle& cost, const py::handle& extra, const py::handle& once,
                            const py::handle& starts, const py::handle& reads, const py::handle& maker,
                            const py::handle& size) {
  const auto costs = integers(cost, "cost"), extras = integers(extra, "extra"), sizes = integers(size, "size");
  const std::size_t n = costs.size(), values = sizes.size();
  StepGraph g;
  g.once = integers(once, "once", 0, 1);
  g.maker = indices(maker, "maker", n);
  has_length(extras.size(), "extra", n, "one for each cost");
  has_length(g.once.size(), "once", n, "one for each cost");
  has_length(g.maker.size(), "maker", values, "one for each size");
  const auto read = indices(reads, "reads", values);
  const auto start = row_starts(starts, n, read.size());
  sum(costs, "cost", kLargestExact);
  sum(extras, "size and extra", kLargestExact, sum(sizes, "size", kLargestExact));
  g.cost.assign(costs.begin(), costs.end());
  g.extra.assign(extras.begin(), extras.end());
  g.size.assign(sizes.begin(), sizes.end());
  g.makes.resize(n);
  g.reads.resize(n);
  g.readers.resize(values);
  for (std::size_t x = 0; x < values; ++x) g.makes[static_cast<std::size_t>(g.maker[x])].push_back(static_cast<int>(x));
  for (std::size_t v = 0; v < n; ++v) {
    for (auto e = static_cast<std::size_t>(start[v]); e < static_cast<std::size_t>(start[v + 1]); ++e) {
      auto& readers = g.readers[static_cast<std::size_t>(read[e])];
      if (!readers.empty() && readers.back() == static_cast<int>(v)) {
        throw py::value_error(at("reads", e) + " is " + std::to_string(read[e]) + ", which node " + std::to_string(v) +
                              " reads already; expected each value once for each node");
      }
      g.reads[v].push_back(read[e]);
      readers.push_back(static_cast<int>(v));
    }
  }
  return g;
}

// Check that a sequence can run: each run comes after the runs that make its inputs, and no node is missing.
inline std::vector<int> start_of(const StepGraph& g, const py::handle& start) {
  const auto sequence = indices(start, "start", g.cost.size());
  if (sequence.empty()) throw py::value_error("start has 0 entries; expected a run of each node at least");
  std::vector<char> ran(g.cost.size(), 0);
  for (std::size_t p = 0; p < sequence.size(); ++p) {
    const auto v = static_cast<std::size_t>(sequence[p]);
    if (ran[v] && g.once[v]) {
      throw py::value_error(at("start", p) + " is a second run of node " + std::to_string(v) + "; expected one, as once says");
    }
    for (const int x : g.reads[v]) {
      const int maker = g.maker[static_cast<std::size_t>(x)];
      if (ran[static_cast<std::size_t>(maker)]) continue;
      throw py::value_error(at("start", p) + " is node " + std::to_string(v) + ", which reads value " + std::to_string(x) +
                            "; expected node " + std::to_string(maker) + ", which makes it, before");
    }
    ran[v] = 1;
  }
  for (std::size_t v = 0; v < ran.size(); ++v) {
    if (ran[v] || (g.makes[v].empty() && g.reads[v].empty() && g.cost[v] == 0 && g.extra[v] == 0)) continue;
    throw py::value_error("start has no run of node " + std::to_string(v) +
                          "; expected one of each node that costs, takes, reads or makes something");
  }
  return sequence;
}

struct Turn {
  std::uint64_t seed;
  Annealer::Limits limits;
};

// Convert rows (seed, moves, hot, cold, wide, narrow, price); see `Annealer::Limits`.
inline std::vector<Turn> turns_of(const py::handle& turns, double clock) {
  const py::tuple rows = entries(turns, "turns");
  std::vector<Turn> out;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    const std::string row = at("turns", k);
    const py::tuple given = entries(rows[k], row);
    if (given.size() != 7) {
      throw py::value_error(row + " has " + std::to_string(given.size()) +
                            " entries; expected 7: seed, moves, hot, cold, wide, narrow, price");
    }
    const auto name = [&](const char* what) { return [=] { return row + ", " + what + ","; }; };
    const i64 seed = integer(given[0], 0, kLargest, name("seed"));
    const i64 moves = integer(given[1], 0, kLargestExact, name("moves"));
    const double hot = real(given[2], false, name("hot")), cold = real(given[3], false, name("cold"));
    const double wide = real(given[4], false, name("wide")), narrow = real(given[5], false, name("narrow"));
    out.push_back({static_cast<std::uint64_t>(seed),
                   {moves, clock, hot, cold, wide, narrow, real(given[6], true, name("price"))}});
  }
  return out;
}

}  // namespace remat::border
