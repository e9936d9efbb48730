// What the searches are made of: limits and outcome, items, states, and the exchanges behind them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace remat {

using i64 = std::int64_t;
using u32 = std::uint32_t;
using i128 = __int128;

struct Limits {
  double seconds = 0.0;          // wall clock; 0: none
  i64 work = 400'000'000;        // states
  std::size_t states = 1'000'000;  // states alive at once in a list: 64 bytes each with its copy
};

struct Outcome {
  std::vector<std::int32_t> saved;  // positions in the caller's arrays, sorted
  i64 value = 0;
  i64 bound = 0;
  bool optimal = false;
  bool by_clock = false;
  i64 work = 0;
};

// An item, or a bundle of `count` identical items that are taken together.
struct Item {
  i64 w;
  i64 p;
  i64 size;            // items in the bundle
  i64 count;           // what the cardinality branches count: items, or units of value beyond weight
  std::int32_t first;  // position of the first of them in `members`
};

struct State {
  i64 w;
  i64 p;
  i64 k;     // what is counted
  u32 node;  // last exchange, in the arena
};

// The exchanges that lead to each state: a forest that only grows, and is compacted when it is large.
class Arena {
 public:
  static constexpr u32 none = 0xFFFFFFFFu;
  Arena() { nodes_.reserve(1024); }
  void clear() { nodes_.clear(); }
  std::size_t size() const { return nodes_.size(); }
  u32 add(u32 parent, std::int32_t item) {
    nodes_.push_back({parent, item});
    return static_cast<u32>(nodes_.size() - 1);
  }
  template <class Visit>
  void walk(u32 node, Visit visit) const {
    for (; node != none; node = nodes_[node].parent) visit(nodes_[node].item);
  }
  // Compacts when it has grown to twice what the last compaction left.
  void tidy(std::vector<State>& states) {
    if (nodes_.size() <= tidy_at_) return;
    compact(states);
    tidy_at_ = std::max(kTidy, 2 * nodes_.size());
  }
  // Keeps only what leads to `states`, whose node numbers change.
  void compact(std::vector<State>& states) {
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

}  // namespace remat
