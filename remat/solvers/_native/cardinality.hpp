// Branch on the number of items (cardinality) of an improving solution: at most k, or at least k + 1. The bounds
// follow COMBO's cardinality bound (Martello, Pisinger, Toth 1999). Each branch has Lagrange multipliers for
// the capacity and for the cardinality, and decides items in the order of their loss: how much the opposite
// decision lowers the bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "halves.hpp"

namespace remat {

class Cardinality : public Halves {
 public:
  using Halves::Halves;

 protected:
  struct Multipliers {
    int shift = 0;
    i64 lambda = 0, mu = 0;  // prices of a unit of weight and of an item in the solution, times 2^shift
    i64 k = 0;               // limit on the number of items: an upper one (mu >= 0) or a lower one (mu <= 0)
    bool at_most = true;
    i64 bound = 0;
  };

  // Linear relaxation with the values p - mu·count: the value per weight of its break item, at which the
  // capacity is used up, and the number of items in its solution.
  struct Relaxed {
    double lambda, held;
  };

  Relaxed relax(double mu, std::vector<std::pair<double, std::int32_t>>& scratch) const {
    scratch.clear();
    double room = static_cast<double>(c_), held = 0;
    for (std::size_t j = 0; j < items_.size(); ++j) {
      const double p = static_cast<double>(items_[j].p) - mu * static_cast<double>(items_[j].count);
      if (p > 0)
        scratch.push_back({p / static_cast<double>(items_[j].w), static_cast<std::int32_t>(j)});
    }
    std::size_t lo = 0, hi = scratch.size();
    // Quickselect for the break item: everything before `lo` is taken.
    auto greater = [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    while (hi - lo > 1) {
      const std::size_t mid = lo + (hi - lo) / 2;
      std::nth_element(scratch.begin() + static_cast<std::ptrdiff_t>(lo),
                       scratch.begin() + static_cast<std::ptrdiff_t>(mid),
                       scratch.begin() + static_cast<std::ptrdiff_t>(hi), greater);
      double w = 0, k = 0;
      for (std::size_t i = lo; i < mid; ++i) {
        w += static_cast<double>(items_[scratch[i].second].w);
        k += static_cast<double>(items_[scratch[i].second].count);
      }
      if (w <= room) {
        room -= w;
        held += k;
        lo = mid;
      } else {
        hi = mid;
      }
    }
    if (lo >= scratch.size()) return {0.0, held};
    const Item& item = items_[scratch[lo].second];
    if (static_cast<double>(item.w) <= room)
      return {0.0, held + static_cast<double>(item.count)};  // everything worth taking fits
    return {scratch[lo].first, held + static_cast<double>(item.count) * room / static_cast<double>(item.w)};
  }

  // Bisect for the multipliers that give one branch the lowest upper bound.
  Multipliers multipliers(i64 k, bool at_most) {
    std::vector<std::pair<double, std::int32_t>> scratch;
    scratch.reserve(items_.size());
    double top = 0;
    for (const Item& item : items_) top = std::max(top, static_cast<double>(item.p));
    double lo = at_most ? 0 : -top, hi = at_most ? top : 0, mu = 0, lambda = 0;
    const double want = static_cast<double>(k);
    for (int round = 0; round < 64; ++round) {
      mu = (lo + hi) / 2;
      const Relaxed r = relax(mu, scratch);
      lambda = r.lambda;
      if (r.held > want)
        lo = mu;
      else if (r.held < want)
        hi = mu;
      else
        break;
      if (hi - lo <= 1e-9 * (1 + std::fabs(mu))) break;
    }
    Multipliers best;
    best.bound = std::numeric_limits<i64>::max();
    // Rounding the multipliers changes the bound a little, so try whole numbers near the optimum too.
    for (const double m : {mu, std::round(mu)}) {
      const double l = m == mu ? lambda : relax(m, scratch).lambda;
      for (const double x : {l, std::round(l)}) {
        Multipliers tried = scaled(x, m, k, at_most);
        if (tried.bound < best.bound) best = tried;
      }
    }
    return best;
  }

  Multipliers scaled(double lambda, double mu, i64 k, bool at_most) const {
    Multipliers m;
    m.k = k;
    m.at_most = at_most;
    double largest = std::max({1.0, lambda, std::fabs(mu)});
    for (const Item& item : items_) largest = std::max(largest, static_cast<double>(item.p));
    m.shift = std::max(0, std::min(24, 60 - static_cast<int>(std::ceil(std::log2(largest + 1)))));
    const double scale = std::ldexp(1.0, m.shift);
    m.lambda = std::max<i64>(0, static_cast<i64>(std::llround(lambda * scale)));
    m.mu = static_cast<i64>(std::llround(mu * scale));
    if (at_most ? m.mu < 0 : m.mu > 0) m.mu = 0;
    i128 d = static_cast<i128>(m.lambda) * c_ + static_cast<i128>(m.mu) * k;
    for (const Item& item : items_) d += std::max<i128>(0, reduced(item, m));
    const i128 floor = d >> m.shift;
    m.bound = floor > std::numeric_limits<i64>::max() ? std::numeric_limits<i64>::max()
                                                       : static_cast<i64>(floor);
    return m;
  }

  static i128 reduced(const Item& item, const Multipliers& m) {
    return (static_cast<i128>(item.p) << m.shift) - static_cast<i128>(m.lambda) * item.w -
           static_cast<i128>(m.mu) * item.count;
  }

  // One branch. `base` is the best choice under the multipliers. `loss` is, by item, how much the bound falls
  // if the item is decided differently from `base`. `order` has the items by rising loss.
  struct Branch {
    Multipliers m;
    std::vector<i128> loss;
    std::vector<char> base;
    std::vector<std::int32_t> order;
    bool done = false;
  };

  // The branches, the one with the higher bound first.
  std::vector<Branch> branch() {
    i64 held = 0;
    for (std::size_t j = 0; j < break_; ++j) held += items_[j].count;
    if (break_ < items_.size()) {
      const Item& b = items_[break_];
      held += static_cast<i64>(static_cast<i128>(b.count) * (c_ - break_w_) / b.w);
    }
    Multipliers few = multipliers(held, true), many = multipliers(held + 1, false);
    for (Multipliers* m : {&few, &many}) m->bound = std::min(m->bound, bound_);
    if (few.bound < many.bound) std::swap(few, many);
    return {start(few), start(many)};
  }

  // Try to improve the incumbent in each branch with `lift`, then search each branch. The upper bound falls to
  // the highest bound of the branches whose search did not finish.
  void close(std::vector<Branch>& branches, int first, int until, std::size_t states) {
    auto open = [&](const Branch& b) { return !b.done && b.m.bound > z_ && bound_ > z_ && !out_of_work(); };
    for (Branch& b : branches)
      for (int attempt = first; attempt < until && open(b); ++attempt) {
        const Filling f = fill(b, attempt);
        lift(f.order, f.chosen, attempt == 0 ? 4000 : attempt == 1 ? 40000 : 160000);
      }
    for (Branch& b : branches)
      if (open(b)) b.done = decide(b, states);
    // A better solution from the other branch may still close an unfinished branch.
    i64 proven = z_;
    for (const Branch& b : branches)
      if (!b.done) proven = std::max(proven, b.m.bound);
    bound_ = std::min(bound_, proven);
  }

  Branch start(const Multipliers& m) const {
    const std::size_t n = items_.size();
    Branch b{m, std::vector<i128>(n), std::vector<char>(n, 0), std::vector<std::int32_t>(n)};
    for (std::size_t j = 0; j < n; ++j) {
      const i128 r = reduced(items_[j], m);
      b.base[j] = r > 0;
      b.loss[j] = r > 0 ? r : -r;
    }
    std::iota(b.order.begin(), b.order.end(), 0);
    std::sort(b.order.begin(), b.order.end(), [&](std::int32_t x, std::int32_t y) {
      return b.loss[x] != b.loss[y] ? b.loss[x] < b.loss[y] : before(items_[x], items_[y]);
    });
    return b;
  }

  // A choice with about as many items and as much weight as the branch allows. The choice has all items with a clear
  // gain. The other items, of little loss, are sorted by weight per counted item, and the contiguous range of them
  // that comes closest is chosen. `order` lists the items to exchange first: those near the ends of the range,
  // alternately inside and outside of it. A few exchanges of these items can fill the capacity that is left.
  struct Filling {
    std::vector<char> chosen;
    std::vector<std::int32_t> order;
  };

  Filling fill(const Branch& b, int attempt) const {
    const i128 gap = static_cast<i128>(b.m.bound - z_) << b.m.shift;
    std::size_t core = 0;
    while (core < b.order.size() && (b.loss[b.order[core]] <= gap || core < 40)) ++core;
    std::vector<std::int32_t> loose(b.order.begin(), b.order.begin() + static_cast<std::ptrdiff_t>(core));
    Filling f{b.base, {}};
    std::vector<char>& x = f.chosen;
    for (std::int32_t j : loose) x[j] = 0;
    i64 w = 0, k = 0;
    for (std::size_t j = 0; j < x.size(); ++j)
      if (x[j]) {
        w += items_[j].w;
        k += items_[j].count;
      }
    // By weight per counted unit, least first.
    auto lean = [&](std::int32_t j) {
      return static_cast<double>(items_[j].w) / static_cast<double>(items_[j].count);
    };
    std::sort(loose.begin(), loose.end(), [&](std::int32_t a, std::int32_t b) {
      const double p = lean(a), q = lean(b);
      return p != q ? p < q : a < b;
    });
    // The range [from, to) grows at its upper end while items are missing. Then it moves up, to heavier items,
    // while they fit.
    std::size_t from = 0, to = 0;
    while (to < loose.size() && k < b.m.k && w + items_[loose[to]].w <= c_) {
      w += items_[loose[to]].w;
      k += items_[loose[to]].count;
      ++to;
    }
    while (to < loose.size() && from < to && w - items_[loose[from]].w + items_[loose[to]].w <= c_) {
      w += items_[loose[to]].w - items_[loose[from]].w;
      ++to;
      ++from;
    }
    for (std::size_t i = from; i < to; ++i) x[loose[i]] = 1;
    const double bottom = from < loose.size() ? lean(loose[from]) : 0;
    const double top = to > 0 ? lean(loose[to - 1]) : 0;
    auto far = [&](std::int32_t j) {
      const double a = std::fabs(lean(j) - top);
      return from > 0 ? std::min(a, std::fabs(lean(j) - bottom)) : a;
    };
    std::vector<std::int32_t> sides[2];
    for (std::int32_t j : loose) sides[static_cast<int>(x[j])].push_back(j);
    for (auto& side : sides) {
      std::sort(side.begin(), side.end(), [&](std::int32_t a, std::int32_t b) {
        const double p = far(a), q = far(b);
        return p != q ? p < q : a < b;
      });
      // Each attempt shuffles differently, and takes its first items from a pool of a different size.
      const double reach = static_cast<double>((c_ - w) >> (attempt % 4 + 1));
      std::size_t pool = std::min<std::size_t>(side.size(), 24 << (attempt % 3));
      while (pool < side.size() && far(side[pool]) <= reach) ++pool;
      shuffle(side.begin(), side.begin() + static_cast<std::ptrdiff_t>(pool),
              static_cast<std::uint64_t>(attempt) * 0xD1342543DE82EF95ull);
    }
    // Alternate in pairs: `lift` splits `order` into two lists of every second item, and each list should get
    // items from both sides.
    for (std::size_t i = 0; i < std::max(sides[0].size(), sides[1].size()); i += 2)
      for (const auto& side : sides)
        for (std::size_t j = i; j < std::min(i + 2, side.size()); ++j) f.order.push_back(side[j]);
    return f;
  }

  // Decide a branch's items by rising loss. True if the whole branch was searched; false if a limit ended the search.
  bool decide(const Branch& b, std::size_t states) {
    const Multipliers& m = b.m;
    const std::size_t n = items_.size();
    State root{0, 0, 0, Arena::none};
    for (std::size_t j = 0; j < n; ++j)
      if (b.base[j]) {
        root.w += items_[j].w;
        root.p += items_[j].p;
        root.k += items_[j].count;
      }
    if (root.w <= c_ && root.p > z_) {
      z_ = root.p;
      best_ = b.base;
    }
    // The Lagrangian bound of a state. Undecided items are as in `base`, which is their best decision.
    const i128 whole = static_cast<i128>(m.lambda) * c_ + static_cast<i128>(m.mu) * m.k;
    auto value = [&](const State& s) {
      return (static_cast<i128>(s.p) << m.shift) - static_cast<i128>(m.lambda) * s.w -
             static_cast<i128>(m.mu) * s.k + whole;
    };
    // How much weight the undecided items can still remove, and how much value they can still add.
    i64 removable = root.w, addable = 0;
    for (std::size_t j = 0; j < n; ++j)
      if (!b.base[j]) addable += items_[j].p;
    auto keep = [&](const State& s) {
      return s.w - removable <= c_ && s.p + addable > z_ &&
             value(s) >= static_cast<i128>(z_ + 1) << m.shift;
    };
    const i128 top = value(root);
    Arena arena;
    std::vector<State> list{root}, next;
    std::size_t joined = 4096;
    for (std::size_t i = 0; i < n; ++i) {
      const std::int32_t at = b.order[i];
      if (top - b.loss[at] < static_cast<i128>(z_ + 1) << m.shift) return true;  // this and all later items lose too much
      if (out_of_work()) return false;
      const Item& item = items_[at];
      const i64 sign = b.base[at] ? -1 : 1;
      (sign < 0 ? removable : addable) -= sign < 0 ? item.w : item.p;
      Found found;
      expand(list, next, arena, at, sign * item.w, sign * item.p, sign * item.count, m.at_most, found, keep);
      list.swap(next);
      note(b.base, arena, found);
      if (m.bound <= z_ || list.empty()) return true;
      if (list.size() > joined && i + 1 < n) {
        joined = list.size() * 4;
        Arena other;
        std::vector<State> right;
        const std::vector<std::int32_t> later(b.order.begin() + static_cast<std::ptrdiff_t>(i + 1), b.order.end());
        exchanges(later, 0, 1, 60000, b.base, right, other, any);
        join(b.base, 0, 0, list, arena, right, other);
        if (m.bound <= z_) return true;
      }
      if (list.size() > states) return false;
      arena.tidy(list);
    }
    return true;
  }
};

}  // namespace remat
