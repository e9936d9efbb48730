// Enumerate solutions from two halves of the items (Horowitz, Sahni 1974), within a budget that grows in steps.
//
// An *exchange* flips one item of the break solution, and loses value against the linear relaxation. The
// budget limits the total loss of a solution. Few exchanges fit a budget. One half decides the items whose
// exchange loses least first, the other half those that lose most first. A state of a half is dropped if the
// items outside of the half cannot fill the remaining capacity within the budget (residual.hpp). When the two
// halves together have decided all items, one sweep over both halves joins their states. Each step finds a better
// solution, or proves that none is within the step's budget. The first incumbent therefore need not be good.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lists.hpp"
#include "residual.hpp"

namespace remat {

class Halves : public Lists {
 public:
  using Lists::Lists;

 protected:
  // True if the incumbent is proven optimal. False if a half has more than `most` states, or if the work exceeds
  // `until`.
  bool deepen(std::size_t most, i64 until) {
    const Break at = around_break();
    Residual all;
    price(all, at, at.order, 0, at.order.size());
    const i64 top = static_cast<i64>((at.relaxed - static_cast<i128>(all.at(c_ - break_w_))) / at.w);
    bound_ = std::min(bound_, top);
    // The first budget is the loss of the thirteenth cheapest exchange, so that some exchanges fit.
    const std::size_t few = std::min<std::size_t>(at.order.size() - 1, 12);
    if (step_ == 0) step_ = std::max<i64>(1, static_cast<i64>(at.loss[at.order[few]] / at.w));
    while (z_ < bound_) {
      const i64 target = std::max(z_, top - step_);
      if (!within(at, all, target, most, until)) return false;
      bound_ = std::min(bound_, std::max(z_, target));
      step_ *= 2;
    }
    return true;
  }

 private:
  static constexpr std::size_t kSample = 60'000;
  static constexpr int kSamples = 8;

  i64 step_ = 0;  // the budget: how far below the bound the value of a solution may be

  // The break solution, and the loss of each exchange with it. Losses and budgets are multiplied by the weight of
  // the break item, so that they are exact integers.
  struct Break {
    i64 w, p;                         // of the break item: p / w is the price of capacity
    std::vector<char> base;           // the break solution
    std::vector<i128> loss;           // by item
    std::vector<std::int32_t> order;  // items by loss
    i128 relaxed = 0;                 // value of the linear relaxation
    i128 scaled(i64 value, i64 room) const {
      return static_cast<i128>(value) * w + static_cast<i128>(room) * p;
    }
  };

  Break around_break() const {
    const std::size_t n = items_.size();
    Break at{items_[break_].w, items_[break_].p, base_at_break(), std::vector<i128>(n), {}};
    at.order.resize(n);
    for (std::size_t j = 0; j < n; ++j) {
      const i128 gain = at.scaled(items_[j].p, -items_[j].w);
      at.loss[j] = gain < 0 ? -gain : gain;
      at.order[j] = static_cast<std::int32_t>(j);
    }
    at.relaxed = at.scaled(break_p_, c_ - break_w_);
    std::sort(at.order.begin(), at.order.end(), [&](std::int32_t x, std::int32_t y) {
      return at.loss[x] != at.loss[y] ? at.loss[x] < at.loss[y] : before(items_[x], items_[y]);
    });
    return at;
  }

  // Compute in `rest` a lower bound on the cost of unused capacity, if only items in order[from, to) can be
  // exchanged.
  void price(Residual& rest, const Break& at, const std::vector<std::int32_t>& order, std::size_t from,
             std::size_t to) {
    std::vector<Residual::Exchange> exchanges;
    exchanges.reserve(to - from);
    for (std::size_t i = from; i < to; ++i) {
      const std::int32_t j = order[i];
      exchanges.push_back({at.base[j] ? -items_[j].w : items_[j].w, static_cast<double>(at.loss[j])});
    }
    rest.build(exchanges, static_cast<double>(at.p), at.w);
    work_ += Residual::kWork;
  }

  // The least value of a solution that this step looks for, times the weight of the break item.
  i128 goal(const Break& at, i64 target) const { return static_cast<i128>(std::max(target, z_) + 1) * at.w; }

  // Look for solutions whose value exceeds `target` and the incumbent. True if the search was complete.
  bool within(const Break& at, const Residual& all, i64 target, std::size_t most, i64 until) {
    std::vector<std::int32_t> order = at.order;
    Residual rest = all;
    bool sampled = false;
    for (bool again = true; again;) {
      again = fix(at, order, rest, target);
      if (again || sampled || order.size() <= 24) continue;
      sampled = true;
      again = sample(at, order, target);
      if (z_ >= bound_) return true;
    }
    return meet(at, order, rest, target, most, until);
  }

  // Drop the items whose exchange loses more than the budget. True if more than a tenth of them was dropped.
  bool fix(const Break& at, std::vector<std::int32_t>& order, Residual& rest, i64 target) {
    const i128 need = goal(at, target);
    const std::size_t before = order.size();
    auto hopeless = [&](std::int32_t j) {
      const i128 left = at.relaxed - at.loss[j];
      if (left < need) return true;
      const i64 room = c_ - break_w_ + (at.base[j] ? items_[j].w : -items_[j].w);
      return left - static_cast<i128>(rest.at(room)) < need;
    };
    order.erase(std::remove_if(order.begin(), order.end(), hopeless), order.end());
    if (order.size() < before) price(rest, at, order, 0, order.size());
    return order.size() * 10 < before * 9;
  }

  // Join lists of exchanges over samples of more and more items, to improve the incumbent. True if it improved.
  bool sample(const Break& at, const std::vector<std::int32_t>& order, i64 target) {
    const i64 was = z_;
    int whole = 0;
    for (int t = 0; t < kSamples && whole < 3 && z_ < bound_ && !out_of_work(); ++t) {
      const std::size_t pool = std::min<std::size_t>(order.size(), static_cast<std::size_t>(32) << t);
      whole += pool == order.size();
      std::vector<std::int32_t> some(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(pool));
      shuffle(some.begin(), some.end(), static_cast<std::uint64_t>(t + 1) * 0xD1342543DE82EF95ull);
      const i128 budget = at.relaxed - goal(at, target);
      auto affordable = [&](const State& s) { return -at.scaled(s.p, -s.w) <= budget; };
      Arena left_arena, right_arena;
      std::vector<State> left, right;
      exchanges(some, 0, 2, kSample, at.base, left, left_arena, affordable);
      exchanges(some, 1, 2, kSample, at.base, right, right_arena, affordable);
      join(at.base, break_w_, break_p_, left, left_arena, right, right_arena);
    }
    return z_ > was;
  }

  // The states of one half: solutions that differ from the break solution only in items that the half decided.
  struct Half {
    std::vector<State> list, next;
    Arena arena;
    Residual rest;                   // cost of unused capacity with the items that this half did not decide
    i64 removable = 0, addable = 0;  // weight and value that these items can still remove and add
    std::size_t priced = 256;        // number of states at which `rest` is recomputed
  };

  bool meet(const Break& at, const std::vector<std::int32_t>& order, const Residual& rest, i64 target,
            std::size_t most, i64 until) {
    auto hopeful = [&](const Half& h, const State& s) {
      if (s.w - h.removable > c_ || s.p + h.addable <= std::max(target, z_)) return false;
      return at.scaled(s.p, c_ - s.w) - static_cast<i128>(h.rest.at(c_ - s.w)) >= goal(at, target);
    };
    Half low, high;
    for (Half* h : {&low, &high}) {
      h->list.assign(1, {break_w_, break_p_, 0, Arena::none});
      h->rest = rest;
      for (std::int32_t j : order) (at.base[j] ? h->removable : h->addable) += at.base[j] ? items_[j].w : items_[j].p;
    }
    if (!hopeful(low, low.list[0])) return true;
    auto join_halves = [&] { join(at.base, -break_w_, -break_p_, low.list, low.arena, high.list, high.arena); };
    for (std::size_t from = 0, to = order.size(); from < to;) {
      if (work_ > until || out_of_work()) return false;
      const bool up = low.list.size() <= high.list.size();
      Half& h = up ? low : high;
      const std::int32_t j = up ? order[from++] : order[--to];
      const i64 sign = at.base[j] ? -1 : 1;
      (sign < 0 ? h.removable : h.addable) -= sign < 0 ? items_[j].w : items_[j].p;
      Found found;
      expand(h.list, h.next, h.arena, j, sign * items_[j].w, sign * items_[j].p, 0, true, found,
             [&](const State& s) { return hopeful(h, s); });
      h.list.swap(h.next);
      note(at.base, h.arena, found);
      if (h.list.size() > h.priced) {
        price(h.rest, at, order, up ? from : 0, up ? order.size() : to);
        auto hopeless = [&](const State& s) { return !hopeful(h, s); };
        h.list.erase(std::remove_if(h.list.begin(), h.list.end(), hopeless), h.list.end());
        h.priced = std::max<std::size_t>(256, 2 * h.list.size());
        join_halves();
      }
      if (h.list.empty() || z_ >= bound_) return true;
      if (h.list.size() > most) return false;
      h.arena.tidy(h.list);
    }
    join_halves();
    return true;
  }
};

}  // namespace remat
