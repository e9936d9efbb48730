// Enumerate the decisions of a graph problem whose Lagrangian loss is within a limit, by dynamic programming.
//
// At a price p per byte and q per unit of cost, a maximum flow proves a lower bound on q*cost + p*bytes of any
// decision. A decision exceeds this bound by the sum of its losses. For an arc that the decision cuts, the loss
// is the capacity that the flow leaves unused. For an arc that crosses the cut backwards, the loss is the flow.
// Every loss is at least 0.
//
// Nodes are decided in topological order. A prefix is a decision on the first nodes; a prefix whose losses sum to
// more than the limit is dropped. The key of a prefix is a set of values: those that are available in backward
// and that later nodes read. Of all prefixes with the same key, those not dominated in bytes and cost are kept.
// MINKNAP's core enumerates the choices of a knapsack in the same way.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interrupt.hpp"
#include "integers.hpp"

namespace remat {

struct GraphCore {
  struct Node {
    i64 size = 0;           // bytes that saving the node takes
    i64 save_loss = 0;      // loss if the node is saved
    i64 recompute_loss = 0; // loss if the node is recomputed
    bool savable = false, recomputable = false, needed = false;
    std::vector<std::pair<int, i64>> inputs;  // earlier nodes that the node reads, and the flow from each
  };
  struct Result {
    bool complete = true;   // no prefix within the limit was dropped
    bool by_clock = false;  // the clock ended the search
    i64 work = 0;           // number of prefixes, see `kKey`
    i64 loss = 0;
    bool found = false;
    i64 bytes = 0;
    std::vector<i64> saved;  // nodes, ascending
  };

  std::vector<Node> nodes;
  i64 price = 0;  // p

  // Total size of all nodes; fits 64 bits.
  i64 bytes() const {
    i64 total = 0;
    for (const Node& node : nodes) total += node.size;
    return total;
  }

  // Find the cheapest decision within a capacity whose loss is at most `limit`. Losses are subtracted from the
  // limit instead of added up, because their sum may exceed 64 bits. If a limit ends the enumeration early,
  // `complete` of the result is false.
  Result run(i64 capacity, i64 limit, i64 work_limit, std::size_t most_prefixes, double seconds) const {
    const auto started = std::chrono::steady_clock::now();
    const std::vector<Bits> bits = key_bits();
    Result out;
    out.complete = bits.size() == nodes.size();
    if (!out.complete) return out;
    std::vector<Event> events;
    Groups groups, next;
    groups.push_back({Key{0}, {{State{0, 0, -1, false}}}});
    for (std::size_t v = 0; v < nodes.size(); ++v) {
      const Node& node = nodes[v];
      next.clear();
      Index index;
      index.reserve(2 * groups.size());
      for (const Group& group : groups) {
        bool all = true;
        i64 idle = 0;  // loss if the node is not recomputed: the flow from its available inputs
        for (const auto& [u, flow] : node.inputs) {
          if (group.key & bits[static_cast<std::size_t>(u)].own) {
            idle += flow;
          } else {
            all = false;
          }
        }
        // Adds the states of one choice for the node.
        const auto emit = [&](Key key, i64 bytes, i64 loss, bool saves) {
          std::vector<State> list;
          list.reserve(group.lists.front().size());
          for (const State& s : group.lists.front()) {
            if (s.loss > limit - loss) continue;
            if (s.bytes + bytes > capacity) break;  // states are sorted by bytes
            list.push_back({s.bytes + bytes, s.loss + loss, s.event, saves});
          }
          add(next, index, key & ~bits[v].ended, std::move(list));
        };
        if (!node.needed) emit(group.key, 0, idle, false);
        if (node.savable) emit(group.key | bits[v].own, node.size, idle + node.save_loss, true);
        if (node.recomputable && all) emit(group.key | bits[v].own, 0, node.recompute_loss, false);
      }
      settle(next, static_cast<std::int32_t>(v), most_prefixes, events, out.complete);
      listen();
      out.work += kKey * static_cast<i64>(groups.size());
      for (const Group& group : next) out.work += static_cast<i64>(group.lists.front().size());
      out.by_clock = seconds > 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count() > seconds;
      if (out.work > work_limit || out.by_clock) {
        out.complete = false;
        return out;
      }
      groups.clear();
      for (Group& group : next) {
        if (!group.lists.front().empty()) groups.push_back(std::move(group));
      }
    }
    take_best(groups, events, out);
    return out;
  }

 private:
  // Work is counted in prefixes, so that a unit takes about 12 ns on every graph. Handling one key takes as
  // long as this number of prefixes.
  static constexpr i64 kKey = 64;
  static constexpr int kSlots = 128;
  static constexpr std::size_t kEvents = 12'000'000;
  using Key = unsigned __int128;

  struct State {
    i64 bytes;
    i64 loss;
    std::int32_t event;  // index of the last event: the last node that the prefix saves
    bool saves;          // whether the current node is saved; it becomes an event if the state is kept
  };
  struct Event {
    std::int32_t before, node;
  };
  struct Group {
    Key key;
    std::vector<std::vector<State>> lists;  // each sorted by bytes; a single list after `merge`
  };
  struct Hash {
    std::size_t operator()(const Key& k) const {
      const auto low = static_cast<std::uint64_t>(k), high = static_cast<std::uint64_t>(k >> 64);
      return static_cast<std::size_t>((low ^ (high * 0x9E3779B97F4A7C15ULL)) * 0xBF58476D1CE4E5B9ULL);
    }
  };
  using Groups = std::vector<Group>;  // in order of first appearance, so that runs repeat
  using Index = std::unordered_map<Key, std::size_t, Hash>;

  // The bit of a node in the keys (0 if no node reads it), and the bits of the nodes of which it is the last reader.
  struct Bits {
    Key own = 0, ended = 0;
  };

  // The bits of all nodes; fewer if more than `kSlots` nodes have to be in a key at a time.
  std::vector<Bits> key_bits() const {
    const std::size_t n = nodes.size();
    std::vector<std::size_t> last(n);
    for (std::size_t v = 0; v < n; ++v) {
      last[v] = v;
      for (const auto& [u, flow] : nodes[v].inputs) last[static_cast<std::size_t>(u)] = v;
    }
    std::vector<std::vector<std::size_t>> ends(n);
    for (std::size_t v = 0; v < n; ++v) ends[last[v]].push_back(v);
    std::vector<Key> unused;
    for (int s = kSlots - 1; s >= 0; --s) unused.push_back(Key{1} << s);
    std::vector<Bits> bits(n);
    for (std::size_t v = 0; v < n; ++v) {
      if (last[v] != v) {
        if (unused.empty()) return {};
        bits[v].own = unused.back();
        unused.pop_back();
      }
      for (const std::size_t u : ends[v]) {
        if (bits[u].own == 0) continue;
        bits[v].ended |= bits[u].own;
        unused.push_back(bits[u].own);
      }
    }
    return bits;
  }

  // Merge the states with the same key, keep about `most` of them, and record which of them save the node.
  void settle(Groups& groups, std::int32_t node, std::size_t most, std::vector<Event>& events, bool& complete) const {
    std::size_t total = 0;
    for (Group& group : groups) {
      merge(group);
      total += group.lists.front().size();
    }
    if (total > most) {
      complete = false;
      thin(groups, total, most);
    }
    for (Group& group : groups) {
      for (State& s : group.lists.front()) {
        if (!s.saves || events.size() > kEvents) continue;  // too many events: all prefixes are dropped below
        events.push_back({s.event, node});
        s.event = static_cast<std::int32_t>(events.size() - 1);
        s.saves = false;
      }
    }
    if (events.size() > kEvents) {
      complete = false;
      groups.clear();
    }
  }

  // Copy the cheapest of the states that are left after the last node to the result.
  void take_best(const Groups& groups, const std::vector<Event>& events, Result& out) const {
    const State* best = nullptr;
    for (const Group& group : groups) {
      for (const State& s : group.lists.front()) {
        if (best == nullptr || cost(s) < cost(*best) || (cost(s) == cost(*best) && s.bytes < best->bytes)) best = &s;
      }
    }
    if (best == nullptr) return;
    out.found = true;
    out.bytes = best->bytes;
    out.loss = best->loss;
    for (std::int32_t e = best->event; e >= 0; e = events[static_cast<std::size_t>(e)].before) {
      out.saved.push_back(events[static_cast<std::size_t>(e)].node);
    }
    std::reverse(out.saved.begin(), out.saved.end());
  }

  i64 cost(const State& s) const { return s.loss - price * s.bytes; }  // q times the cost, up to a constant

  static void add(Groups& groups, Index& index, Key key, std::vector<State> list) {
    if (list.empty()) return;
    const auto [at, fresh] = index.try_emplace(key, groups.size());
    if (fresh) groups.push_back({key, {}});
    groups[at->second].lists.push_back(std::move(list));
  }

  // Merge the lists into one. In each list before and after, states have rising bytes and falling cost.
  void merge(Group& group) const {
    auto& lists = group.lists;
    while (lists.size() > 1) {
      std::vector<std::vector<State>> half;
      for (std::size_t i = 0; i + 1 < lists.size(); i += 2) half.push_back(merged(lists[i], lists[i + 1]));
      if (lists.size() % 2) half.push_back(std::move(lists.back()));
      lists = std::move(half);
    }
  }

  // Reduce the prefixes to about `most`. Of the prefixes in a group with similar bytes, keep the one that has
  // lost least.
  static void thin(Groups& groups, std::size_t total, std::size_t most) {
    if (groups.size() > most / 4) {  // keep the groups with the least loss, in their old order
      std::vector<i64> least;
      for (const Group& group : groups) least.push_back(least_loss(group));
      std::vector<i64> sorted = least;
      std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(most / 4), sorted.end());
      const i64 limit = sorted[most / 4];
      Groups kept;
      total = 0;
      for (std::size_t g = 0; g < groups.size() && kept.size() < most / 4; ++g) {
        if (least[g] > limit) continue;
        total += groups[g].lists.front().size();
        kept.push_back(std::move(groups[g]));
      }
      groups = std::move(kept);
    }
    for (Group& group : groups) {
      auto& list = group.lists.front();
      const std::size_t quota = std::max<std::size_t>(4, most * list.size() / total);
      if (list.size() > quota) {
        const i64 first = list.front().bytes;
        const i64 width = (list.back().bytes - first) / static_cast<i64>(quota) + 1;
        std::vector<State> kept;
        kept.reserve(quota + 1);
        i64 bucket = -1;
        for (const State& s : list) {
          const i64 at = (s.bytes - first) / width;
          if (at != bucket) {
            kept.push_back(s);
            bucket = at;
          } else if (s.loss < kept.back().loss) {
            kept.back() = s;
          }
        }
        list = std::move(kept);
      }
    }
  }

  static i64 least_loss(const Group& group) {
    i64 least = INT64_MAX;
    for (const State& s : group.lists.front()) least = std::min(least, s.loss);
    return least;
  }

  std::vector<State> merged(const std::vector<State>& a, const std::vector<State>& b) const {
    std::vector<State> out;
    out.reserve(a.size() + b.size());
    auto i = a.begin();
    auto j = b.begin();
    while (i != a.end() || j != b.end()) {
      const bool left = j == b.end() || (i != a.end() && (i->bytes < j->bytes || (i->bytes == j->bytes && i->loss <= j->loss)));
      const State& s = left ? *i++ : *j++;
      if (out.empty() || cost(s) < cost(out.back())) out.push_back(s);
    }
    return out;
  }
};

}  // namespace remat
