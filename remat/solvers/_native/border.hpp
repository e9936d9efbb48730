// Checks of the values of arguments before the kernel uses them: lengths, indices, signs and sums. pybind11 checks
// the types. An error message names the argument, its value, and the expected value.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "anneal.hpp"
#include "graph_core.hpp"
#include "integers.hpp"

namespace remat::border {

namespace py = pybind11;
using Column = std::vector<i64>;

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

inline i64 integer(i64 number, const std::string& name, i64 low = 0, i64 high = kLargest) {
  if (low <= number && number <= high) return number;
  const std::string expected =
      high < low ? "; expected none, as there are none" : "; expected an integer from " + text(low) + " to " + text(high);
  throw py::value_error(name + " is " + std::to_string(number) + expected);
}

inline void has_length(std::size_t length, const std::string& name, std::size_t expected, const std::string& each) {
  if (length == expected) return;
  throw py::value_error(name + " has " + std::to_string(length) + " entries; expected " + std::to_string(expected) +
                        ", " + each);
}

inline const Column& integers(const Column& numbers, const std::string& name, i64 low = 0, i64 high = kLargest) {
  if (numbers.size() > kMostEntries) has_length(numbers.size(), name, kMostEntries, "or fewer");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < low || numbers[i] > high) integer(numbers[i], at(name, i), low, high);
  }
  return numbers;
}

inline std::vector<int> indices(const Column& numbers, const std::string& name, std::size_t below) {
  integers(numbers, name, 0, static_cast<i64>(below) - 1);
  return std::vector<int>(numbers.begin(), numbers.end());
}

// Return a finite number of at least 0 (if `zero` is true) or above 0 (if `zero` is false).
inline double real(double number, bool zero, const std::string& name) {
  if (std::isfinite(number) && (zero ? number >= 0 : number > 0)) return number;
  throw py::value_error(name + " is " + std::to_string(number) + "; expected a finite number " +
                        (zero ? "of 0 or more" : "above 0"));
}

inline double seconds(double number) { return real(number, true, "seconds"); }

// Return `before` plus the sum of the numbers; refuse a result above `most`.
inline i64 sum(const Column& numbers, const std::string& name, i64 most, i64 before = 0) {
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

// Check a knapsack whose sums of weights and of values may be up to `most`. Return the capacity, or the total weight
// if that is less: a larger capacity changes nothing.
inline i64 knapsack(const Column& weights, const Column& values, i64 capacity, i64 most) {
  integers(weights, "weights");
  integers(values, "values");
  has_length(values.size(), "values", weights.size(), "one for each weight");
  sum(values, "values", most);
  return std::min(integer(capacity, "capacity"), sum(weights, "weights", most));
}

// ---- graphs --------------------------------------------------------------------------------------

// Check the offset of each node's inputs in a column that holds the inputs of all nodes one after the other.
inline void check_starts(const Column& starts, std::size_t nodes, std::size_t entries_of_all) {
  has_length(starts.size(), "starts", nodes + 1, "one for each node and the end");
  const auto end = static_cast<i64>(entries_of_all);
  for (std::size_t v = 0; v <= nodes; ++v) {
    const i64 low = v == nodes ? end : v == 0 ? 0 : starts[v - 1];
    integer(starts[v], at("starts", v), low, v == 0 ? 0 : end);
  }
}

// The arguments are columns with one entry per node, except for `sources` and `flows`. These two hold the
// inputs of all nodes one after the other: those of node v from `starts[v]` up to `starts[v + 1]`.
inline GraphCore graph_core(const Column& size, const Column& save, const Column& again, const Column& flag,
                            const Column& start, const Column& source, const Column& flow, i64 price) {
  const std::size_t n = size.size();
  integers(size, "sizes");
  integers(save, "save_losses");
  integers(again, "recompute_losses");
  integers(flag, "flags", 0, 7);
  has_length(save.size(), "save_losses", n, "one for each size");
  has_length(again.size(), "recompute_losses", n, "one for each size");
  has_length(flag.size(), "flags", n, "one for each size");
  integers(source, "sources", 0, static_cast<i64>(n) - 1);
  integers(flow, "flows");
  has_length(flow.size(), "flows", source.size(), "one for each of sources");
  check_starts(start, n, source.size());
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
      node.inputs.emplace_back(static_cast<int>(source[e]), flow[e]);
    }
  }
  return core;
}

// `reads` lists the values that the nodes read, for one node after the other: those of node v start at
// `starts[v]`.
inline ScheduleGraph schedule_graph(const Column& cost, const Column& extra, const Column& once, const Column& start,
                                    const Column& reads, const Column& maker, const Column& size) {
  const std::size_t n = cost.size(), values = size.size();
  integers(cost, "cost");
  integers(extra, "extra");
  integers(size, "size");
  ScheduleGraph g;
  g.once = integers(once, "once", 0, 1);
  g.maker = indices(maker, "maker", n);
  has_length(extra.size(), "extra", n, "one for each cost");
  has_length(g.once.size(), "once", n, "one for each cost");
  has_length(g.maker.size(), "maker", values, "one for each size");
  const auto read = indices(reads, "reads", values);
  check_starts(start, n, read.size());
  sum(cost, "cost", kLargestExact);
  sum(extra, "size and extra", kLargestExact, sum(size, "size", kLargestExact));
  g.cost.assign(cost.begin(), cost.end());
  g.extra.assign(extra.begin(), extra.end());
  g.size.assign(size.begin(), size.end());
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
inline std::vector<int> start_of(const ScheduleGraph& g, const Column& start) {
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

// A row (seed, moves, hot, cold, wide, narrow, price) of the argument `turns`; see `Annealer::Limits`.
using Row = std::tuple<i64, i64, double, double, double, double, double>;

inline Annealer::Limits limits_of(const Row& row, double clock) {
  const auto [seed, moves, hot, cold, wide, narrow, price] = row;
  return {static_cast<std::uint64_t>(integer(seed, "seed")), integer(moves, "moves", 0, kLargestExact), clock,
          real(hot, false, "hot"), real(cold, false, "cold"), real(wide, false, "wide"),
          real(narrow, false, "narrow"), real(price, true, "price")};
}

}  // namespace remat::border
