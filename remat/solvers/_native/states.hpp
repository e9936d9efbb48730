// Data types of the searches: limits, outcome, items, states, and the exchanges that lead to each state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "integers.hpp"

namespace remat {

struct Limits {
  double seconds;      // wall clock; 0: none
  i64 work;            // states
  std::size_t states;  // states kept in a list at one time; each takes 64 bytes, including a copy
};

struct Outcome {
  std::vector<std::int32_t> saved;  // positions in the caller's arrays, sorted
  i64 value = 0;
  i64 bound = 0;
  bool optimal = false;
  bool by_clock = false;
};

// A bundle of `size` identical items that are taken together; it may be a single item.
struct Item {
  i64 w;               // weight of the bundle
  i64 p;               // value of the bundle
  i64 size;            // number of items in the bundle
  i64 count;           // number that the cardinality branches count: items, or units of value beyond weight
  std::int32_t first;  // index of the first of these items in `members_`
};

struct State {
  i64 w;
  i64 p;
  i64 k;     // sum of the counts of the items, for the cardinality branches
  u32 node;  // the last exchange of this state, in the arena
};

// The exchanges that lead to each state, as a forest: each exchange refers to the one before it. `tidy` removes
// unused exchanges when the forest has become large.
class Arena {
 public:
  static constexpr u32 none = 0xFFFFFFFFu;
  Arena() { nodes_.reserve(1024); }
  u32 add(u32 parent, std::int32_t item) {
    if (nodes_.size() >= none) throw std::bad_alloc();  // node numbers are used up
    nodes_.push_back({parent, item});
    return static_cast<u32>(nodes_.size() - 1);
  }
  template <class Visit>
  void walk(u32 node, Visit visit) const {
    for (; node != none; node = nodes_[node].parent) visit(nodes_[node].item);
  }
  // If the forest has doubled since the last call, keeps only the exchanges that lead to `states`, and
  // renumbers the nodes in `states`.
  void tidy(std::vector<State>& states) {
    if (nodes_.size() <= tidy_at_) return;
    std::vector<u32> to(nodes_.size(), none);
    for (const State& s : states)
      for (u32 v = s.node; v != none && to[v] == none; v = nodes_[v].parent) to[v] = 0;
    u32 next = 0;
    for (u32 v = 0; v < nodes_.size(); ++v) {
      if (to[v] == none) continue;
      Node n = nodes_[v];
      if (n.parent != none) n.parent = to[n.parent];
      to[v] = next;
      nodes_[next++] = n;
    }
    nodes_.resize(next);
    for (State& s : states)
      if (s.node != none) s.node = to[s.node];
    tidy_at_ = std::max(kTidy, 2 * nodes_.size());
  }

 private:
  struct Node {
    u32 parent;
    std::int32_t item;
  };
  static constexpr std::size_t kTidy = 500'000;
  std::size_t tidy_at_ = kTidy;
  std::vector<Node> nodes_;
};

// Merge `in` with a copy shifted by an exchange, without dominated states. The result is sorted by weight, and
// values rise. Shifting stops at the first state that does not `fit`; shifted states without `worth` are dropped.
template <class Fit, class Worth>
void merge_shifted(const std::vector<State>& in, std::vector<State>& out, Arena& arena, std::int32_t item, i64 dw,
                   i64 dp, Fit fit, Worth worth) {
  out.clear();
  std::size_t i = 0, j = 0;
  const std::size_t n = in.size();
  i64 last = std::numeric_limits<i64>::min();
  while (i < n || j < n) {
    if (j < n && !fit(in[j])) {
      j = n;
      continue;
    }
    const bool shifted =
        i == n || (j < n && (in[j].w + dw < in[i].w || (in[j].w + dw == in[i].w && in[j].p + dp > in[i].p)));
    State s = shifted ? in[j++] : in[i++];
    if (shifted) {
      s.w += dw;
      s.p += dp;
    }
    if (s.p <= last || (shifted && !worth(s))) continue;
    last = s.p;
    if (shifted) s.node = arena.add(s.node, item);
    out.push_back(s);
  }
}

constexpr auto any = [](const State&) { return true; };

}  // namespace remat
