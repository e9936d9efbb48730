// Lists of states, and the operations on them. An *exchange* flips the decision for one or more items.
//
//   expand    merges a list with a copy of the list shifted by an exchange, without states that are dominated
//             or cannot improve the incumbent.
//   exchanges lists all undominated exchanges over a few items.
//   join      finds the best pair of states of two lists in one sweep: 10^9 pairs take a millisecond.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "search.hpp"

namespace remat {

class Lists : public Search {
 public:
  using Search::Search;

 protected:
  // Item positions by rising loss: how much the linear bound falls if the item is flipped.
  std::vector<std::int32_t> by_reduced_profit() const {
    const std::size_t n = items_.size();
    std::vector<std::int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    if (break_ == n) return order;
    const double e = static_cast<double>(items_[break_].p) / static_cast<double>(items_[break_].w);
    std::vector<double> loss(n);
    for (std::size_t j = 0; j < n; ++j)
      loss[j] = std::fabs(static_cast<double>(items_[j].p) - e * static_cast<double>(items_[j].w));
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return loss[a] != loss[b] ? loss[a] < loss[b] : before(items_[a], items_[b]);
    });
    return order;
  }

  // An improved solution that `expand` found; `note` copies its items to `best_`.
  struct Found {
    bool any = false;
    u32 parent = Arena::none;
    std::int32_t item = -1;
  };

  // Write to `out` the states of `in` and the same states shifted by an exchange, sorted by weight. Dominated
  // states and states without `keep` are left out. Of two states with equal weight and value, keep the one with
  // the lower count k if `low_k` is true, else the one with the higher count.
  template <class Keep>
  void expand(const std::vector<State>& in, std::vector<State>& out, Arena& arena, std::int32_t item, i64 dw,
              i64 dp, i64 dk, bool low_k, Found& found, Keep keep) {
    out.clear();
    const std::size_t n = in.size();
    work_ += static_cast<i64>(2 * n);
    // Whether the shifted copy of `s` comes before `t`.
    const auto precedes = [&](const State& s, const State& t) {
      if (s.w + dw != t.w) return s.w + dw < t.w;
      if (s.p + dp != t.p) return s.p + dp > t.p;
      return low_k ? s.k + dk < t.k : s.k + dk > t.k;
    };
    std::size_t i = 0, j = 0;
    i64 last = std::numeric_limits<i64>::min();
    while (i < n || j < n) {
      const bool shifted = i == n || (j < n && precedes(in[j], in[i]));
      State s = shifted ? in[j++] : in[i++];
      if (shifted) s = {s.w + dw, s.p + dp, s.k + dk, s.node};
      if (s.p <= last) continue;
      last = s.p;
      if (shifted && s.w <= c_ && s.p > z_) {
        z_ = s.p;
        found = {true, s.node, item};
      }
      if (!keep(s)) continue;
      if (shifted) s.node = arena.add(s.node, item);
      out.push_back(s);
    }
  }

  void note(const std::vector<char>& base, const Arena& arena, const Found& found) {
    if (!found.any) return;
    best_ = base;
    arena.walk(found.parent, [&](std::int32_t item) { best_[item] ^= 1; });
    best_[found.item] ^= 1;
  }

  // List the undominated exchanges over every `step`-th item of `order`: sorted by weight, values strictly
  // rising. Exchanges without `worth` are left out. The list has at most `most` entries.
  template <class Worth>
  void exchanges(const std::vector<std::int32_t>& order, std::size_t from, std::size_t step, std::size_t most,
                 const std::vector<char>& base, std::vector<State>& list, Arena& arena, Worth worth) {
    list.assign(1, {0, 0, 0, Arena::none});
    std::vector<State> next;
    for (std::size_t i = from; i < order.size() && list.size() * 2 <= most; i += step) {
      const Item& item = items_[order[i]];
      const i64 sign = base[order[i]] ? -1 : 1;
      work_ += static_cast<i64>(2 * list.size());
      merge_shifted(list, next, arena, order[i], sign * item.w, sign * item.p, any, worth);
      list.swap(next);
    }
  }

  // Try every pair of exchanges of the solution `base`, one from each of two lists of up to `most` exchanges.
  void lift(const std::vector<std::int32_t>& order, const std::vector<char>& base, std::size_t most) {
    i64 w0 = 0, p0 = 0;
    for (std::size_t j = 0; j < items_.size(); ++j)
      if (base[j]) {
        w0 += items_[j].w;
        p0 += items_[j].p;
      }
    Arena left_arena, right_arena;
    std::vector<State> left, right;
    exchanges(order, 0, 2, most, base, left, left_arena, any);
    exchanges(order, 1, 2, most, base, right, right_arena, any);
    join(base, w0, p0, left, left_arena, right, right_arena);
  }

  void join(const std::vector<char>& base, i64 w0, i64 p0, const std::vector<State>& left,
            const Arena& left_arena, const std::vector<State>& right, const Arena& right_arena) {
    work_ += static_cast<i64>(left.size() + right.size());
    std::size_t j = right.size();
    i64 top = z_;
    u32 l = Arena::none, r = Arena::none;
    for (const State& a : left) {
      while (j > 0 && w0 + a.w + right[j - 1].w > c_) --j;
      if (j == 0) break;
      const i64 p = p0 + a.p + right[j - 1].p;
      if (p > top) {
        top = p;
        l = a.node;
        r = right[j - 1].node;
      }
    }
    if (top <= z_) return;
    z_ = top;
    best_ = base;
    left_arena.walk(l, [&](std::int32_t item) { best_[item] ^= 1; });
    right_arena.walk(r, [&](std::int32_t item) { best_[item] ^= 1; });
  }
};

}  // namespace remat
