// Exact 0/1 knapsack in 64-bit integers.
//
// Four stages, each exact if no limit ends it:
//
//   core      MINKNAP (Pisinger 1997): undominated states over a growing range of items around the break
//             item. The range grows by one item to the right and one to the left. Linear bounds prune states.
//   lift      two lists of exchanges around the break solution, joined in one sweep (lists.hpp). Improves
//             the incumbent; on correlated items mostly to the bound.
//   deepen    Gomory's group relaxation prices the capacity that the break solution leaves unused. The
//             solutions within a budget of that bound are enumerated in two halves (residual.hpp, halves.hpp).
//   close     two branches on the number of items in an improving solution (cardinality.hpp).
//
// The break solution takes items in order of value per weight, up to the first item that does not fit: the
// break item. Limits count states, so that answers repeat; a time limit may be set as well.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cardinality.hpp"

namespace remat {

class Solver : private Cardinality {
 public:
  using Cardinality::Cardinality;

  Outcome run() {
    prepare();
    if (!items_.empty()) search();
    return finish();
  }

 private:
  static constexpr std::size_t kFewStates = 10'000;
  static constexpr i64 kFewWork = 8'000'000;

  void search() {
    break_solution();
    bound_ = linear_bound();
    if (z_ >= bound_) return;
    std::vector<std::int32_t> near = by_reduced_profit();
    lift(near, base_at_break(), 2000);
    if (z_ >= bound_) return;
    if (core(kCoreStates)) {
      bound_ = z_;
      return;
    }
    if (stopped_) return;
    if (deepen(kFewStates, work_ + kFewWork)) return;
    if (stopped_) return;
    lift(near, base_at_break(), 60000);
    if (z_ >= bound_) return;
    // A few lifts and a small search solve most problems; the rest gets larger limits.
    std::vector<Branch> branches = branch();
    close(branches, 0, 3, 200'000);
    if (z_ >= bound_ || stopped_) return;
    if (deepen(limits_.states / 4, limits_.work)) return;
    if (!stopped_) close(branches, 3, 60, limits_.states);
  }

  // ---- core: MINKNAP -----------------------------------------------------------------------------

  static constexpr std::size_t kCoreStates = 60'000;

  // True if the incumbent is proven optimal; false if the list has more than `most` states or work ran out.
  bool core(std::size_t most) {
    const std::size_t n = items_.size();
    const std::vector<char> base = base_at_break();
    const Item& b = items_[break_];
    Arena arena;
    std::vector<State> list{{break_w_, break_p_, 0, Arena::none}}, next;
    std::ptrdiff_t s = static_cast<std::ptrdiff_t>(break_) - 1;
    std::size_t t = break_;
    const i128 slack = static_cast<i128>(c_ - break_w_) * b.p;
    // Flipping item j is worthwhile if the bound (p̄ ± p_j) + (c - w̄ ∓ w_j)·p_b/w_b beats the incumbent. Here p̄
    // and w̄ are the value and weight of the break solution, and b is the break item.
    auto worth = [&](const Item& item, int sign) {
      const i128 left = slack - static_cast<i128>(sign) * item.w * b.p;
      const i128 need = static_cast<i128>(z_ + 1 - break_p_ - sign * item.p) * b.w;
      return left >= need;
    };
    while (!list.empty() && (t < n || s >= 0)) {
      if (out_of_work() || list.size() > most) return false;
      bool grown = false;
      const i64 before = z_;
      auto keep = [&](const State& x) {
        if (x.w <= c_) {
          if (t >= n) return false;
          const Item& r = items_[t];
          return static_cast<i128>(c_ - x.w) * r.p >= static_cast<i128>(z_ + 1 - x.p) * r.w;
        }
        if (s < 0) return false;
        const Item& l = items_[static_cast<std::size_t>(s)];
        return static_cast<i128>(x.p - z_ - 1) * l.w >= static_cast<i128>(x.w - c_) * l.p;
      };
      auto widen = [&](std::size_t at, int sign) {
        if (!worth(items_[at], sign)) return;
        Found found;
        expand(list, next, arena, static_cast<std::int32_t>(at), sign * items_[at].w, sign * items_[at].p, 0, true,
               found, keep);
        list.swap(next);
        note(base, arena, found);
        grown = true;
      };
      if (t < n) widen(t++, 1);
      if (s >= 0) widen(static_cast<std::size_t>(s--), -1);
      if (z_ > before && z_ >= bound_) return true;
      if (grown) arena.tidy(list);
    }
    return true;
  }
};

}  // namespace remat
