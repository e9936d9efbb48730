// Exact 0/1 knapsack in 64-bit integers.
//
// Three stages, each exact where it ends by itself:
//
//   core      MINKNAP (Pisinger 1997): undominated states around the break item, widened by one item to
//             the right and one to the left in turn, pruned by linear bounds.
//   lift      two lists of exchanges around the break solution, joined in one sweep: 10^9 exchanges are
//             looked at in a millisecond. Lifts the incumbent; on correlated items mostly to the bound.
//   branch    two branches on how many items an improving solution holds (after COMBO's cardinality
//             bound, Martello, Pisinger, Toth 1999), each with Lagrangian multipliers for capacity and
//             cardinality; items are decided in the order of their reduced profits.
//
// Work is counted in states, so that an answer repeats; a clock, where one is set, ends the search too.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace remat {

using i64 = std::int64_t;
using u32 = std::uint32_t;
using i128 = __int128;

struct Limits {
  double seconds = 0.0;          // wall clock; 0: none
  i64 work = 400'000'000;        // states
  std::size_t states = 1'000'000;  // states alive at once: 48 bytes each with its copy
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

class Solver {
 public:
  Solver(const std::vector<i64>& weights, const std::vector<i64>& values, i64 capacity, Limits limits)
      : weights_(weights), values_(values), capacity_(capacity), limits_(limits) {
    start_ = std::chrono::steady_clock::now();
  }

  Outcome run() {
    prepare();
    if (!items_.empty()) search();
    return finish();
  }

 private:
  const std::vector<i64>& weights_;
  const std::vector<i64>& values_;
  i64 capacity_;
  Limits limits_;
  std::chrono::steady_clock::time_point start_;

  std::vector<std::int32_t> taken_;    // positions saved in any case
  std::vector<std::int32_t> members_;  // positions behind the items
  std::vector<Item> items_;            // by falling efficiency
  i64 c_ = 0;                          // capacity in units of the common divisor
  i64 value_unit_ = 1;                 // common divisor of the values
  i64 z_ = 0;                          // incumbent, in units of value_unit_
  std::vector<char> best_;             // incumbent, by item
  i64 bound_ = 0;
  i64 work_ = 0;
  bool stopped_ = false, by_clock_ = false;
  std::size_t break_ = 0;
  i64 break_w_ = 0, break_p_ = 0;

  // ---- preparation -------------------------------------------------------------------------------

  static bool more_efficient(const Item& a, const Item& b) {
    const i128 l = static_cast<i128>(a.p) * b.w, r = static_cast<i128>(b.p) * a.w;
    if (l != r) return l > r;
    return before(a, b);
  }

  // Any fixed order that has nothing to do with weights: among equally good items, the first few
  // should be a fair sample.
  static bool before(const Item& a, const Item& b) {
    const std::uint64_t x = scramble(a), y = scramble(b);
    return x != y ? x < y : a.first < b.first;
  }
  static std::uint64_t scramble(const Item& a) {
    return mix(static_cast<std::uint64_t>(a.w) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(a.p));
  }
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  void prepare() {
    const std::size_t n = weights_.size();
    std::vector<std::int32_t> rest;
    i64 g = 0, gp = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (weights_[i] == 0) {
        if (values_[i] > 0) taken_.push_back(static_cast<std::int32_t>(i));
      } else if (weights_[i] <= capacity_ && values_[i] > 0) {
        rest.push_back(static_cast<std::int32_t>(i));
        g = std::gcd(g, weights_[i]);
        gp = std::gcd(gp, values_[i]);
      }
    }
    if (rest.empty()) return;
    c_ = capacity_ / g;
    value_unit_ = gp;
    std::sort(rest.begin(), rest.end(), [&](std::int32_t a, std::int32_t b) {
      if (weights_[a] != weights_[b]) return weights_[a] < weights_[b];
      if (values_[a] != values_[b]) return values_[a] > values_[b];
      return a < b;
    });
    const i64 unit = value_beyond_weight(rest);
    for (std::size_t i = 0; i < rest.size();) {
      std::size_t j = i;
      while (j < rest.size() && weights_[rest[j]] == weights_[rest[i]] &&
             values_[rest[j]] == values_[rest[i]])
        ++j;
      const i64 w = weights_[rest[i]] / g, p = values_[rest[i]] / gp;
      i64 left = std::min<i64>(static_cast<i64>(j - i), c_ / w);
      std::size_t at = i;
      for (i64 bundle = 1; left > 0; bundle *= 2) {
        const i64 size = static_cast<i64>(j - i) < 8 ? 1 : std::min(bundle, left);
        const i64 count = size * counted(rest[i], unit);
        items_.push_back({w * size, p * size, size, count, static_cast<std::int32_t>(members_.size())});
        for (i64 k = 0; k < size; ++k) members_.push_back(rest[at++]);
        left -= size;
      }
      i = j;
    }
    std::sort(items_.begin(), items_.end(), more_efficient);
    best_.assign(items_.size(), 0);
  }

  // Where every value is its weight plus a multiple of one large unit, as with strongly correlated
  // items, the multiples are what a tight bound must count; 0 where that is not so.
  i64 value_beyond_weight(const std::vector<std::int32_t>& rest) const {
    i64 unit = 0;
    bool above = false, below = false;
    for (std::int32_t i : rest) {
      const i64 d = values_[static_cast<std::size_t>(i)] - weights_[static_cast<std::size_t>(i)];
      unit = std::gcd(unit, d < 0 ? -d : d);
      above |= d > 0;
      below |= d < 0;
      if (d == 0 || unit < 8 || (above && below)) return 0;
    }
    return above ? unit : -unit;
  }

  i64 counted(std::int32_t i, i64 unit) const {
    if (unit == 0) return 1;
    return (values_[static_cast<std::size_t>(i)] - weights_[static_cast<std::size_t>(i)]) / unit;
  }

  // ---- the search --------------------------------------------------------------------------------

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
    lift(near, base_at_break(), 60000);
    if (z_ >= bound_) return;
    branch();
  }

  void break_solution() {
    i64 w = 0, p = 0;
    std::size_t b = 0;
    for (; b < items_.size() && w + items_[b].w <= c_; ++b) {
      w += items_[b].w;
      p += items_[b].p;
      best_[b] = 1;
    }
    break_ = b;
    break_w_ = w;
    break_p_ = p;
    z_ = p;
    // Fill what is left greedily; and the break item with others thrown out for it.
    i64 room = c_ - w;
    for (std::size_t j = b; j < items_.size() && room > 0; ++j) {
      if (items_[j].w <= room) {
        room -= items_[j].w;
        z_ += items_[j].p;
        best_[j] = 1;
      }
    }
  }

  i64 linear_bound() const {
    if (break_ == items_.size()) return break_p_;
    const Item& b = items_[break_];
    return break_p_ + static_cast<i64>(static_cast<i128>(c_ - break_w_) * b.p / b.w);
  }

  std::vector<char> base_at_break() const {
    std::vector<char> base(items_.size(), 0);
    std::fill(base.begin(), base.begin() + static_cast<std::ptrdiff_t>(break_), 1);
    return base;
  }

  // Positions by the loss that flipping an item away from the break solution brings.
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

  bool out_of_work() {
    if (stopped_) return true;
    if (work_ > limits_.work) stopped_ = true;
    if (limits_.seconds > 0) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
      if (spent.count() > limits_.seconds) stopped_ = by_clock_ = true;
    }
    return stopped_;
  }

  // An improved solution found while a list is expanded, until it can be written down.
  struct Found {
    bool any = false;
    u32 parent = Arena::none;
    std::int32_t item = -1;
  };

  // in ∪ (in shifted by an exchange) without what is dominated or cannot improve, sorted by weight.
  // `low_k` says which of two states with equal weight and value to keep.
  template <class Keep>
  void expand(const std::vector<State>& in, std::vector<State>& out, Arena& arena, std::int32_t item, i64 dw,
              i64 dp, i64 dk, bool low_k, Found& found, Keep keep) {
    out.clear();
    const std::size_t n = in.size();
    work_ += static_cast<i64>(2 * n);
    std::size_t i = 0, j = 0;
    i64 last = std::numeric_limits<i64>::min();
    while (i < n || j < n) {
      bool shifted;
      if (i == n) {
        shifted = true;
      } else if (j == n) {
        shifted = false;
      } else {
        const i64 wi = in[i].w, wj = in[j].w + dw;
        if (wi != wj) {
          shifted = wj < wi;
        } else {
          const i64 pi = in[i].p, pj = in[j].p + dp;
          if (pi != pj)
            shifted = pj > pi;
          else
            shifted = low_k ? in[j].k + dk < in[i].k : in[j].k + dk > in[i].k;
        }
      }
      if (!shifted) {
        const State& s = in[i++];
        if (s.p <= last) continue;
        last = s.p;
        if (keep(s)) out.push_back(s);
        continue;
      }
      State s{in[j].w + dw, in[j].p + dp, in[j].k + dk, in[j].node};
      ++j;
      if (s.p <= last) continue;
      last = s.p;
      if (s.w <= c_ && s.p > z_) {
        z_ = s.p;
        found = {true, s.node, item};
      }
      if (!keep(s)) continue;
      s.node = arena.add(s.node, item);
      out.push_back(s);
    }
  }

  void write_down(const std::vector<char>& base, const Arena& arena, u32 node) {
    best_ = base;
    arena.walk(node, [&](std::int32_t item) { best_[item] ^= 1; });
  }

  void note(const std::vector<char>& base, const Arena& arena, const Found& found) {
    if (!found.any) return;
    write_down(base, arena, found.parent);
    best_[found.item] ^= 1;
  }

  // ---- core: MINKNAP -----------------------------------------------------------------------------

  static constexpr std::size_t kCoreStates = 60'000;

  // True when the incumbent is proven optimal; false when the list outgrew `most`.
  bool core(std::size_t most) {
    const std::size_t n = items_.size();
    const std::vector<char> base = base_at_break();
    const Item& b = items_[break_];
    Arena arena;
    std::vector<State> list{{break_w_, break_p_, 0, Arena::none}}, next;
    std::ptrdiff_t s = static_cast<std::ptrdiff_t>(break_) - 1;
    std::size_t t = break_;
    const i128 slack = static_cast<i128>(c_ - break_w_) * b.p;
    // Worth flipping item j: its best bound, (p̄ ± p_j) + (c - w̄ ∓ w_j)·p_b/w_b, beats the incumbent.
    auto worth = [&](const Item& item, int sign) {
      const i128 left = slack - static_cast<i128>(sign) * item.w * b.p;
      const i128 need = static_cast<i128>(z_ + 1 - break_p_ - sign * item.p) * b.w;
      return left >= need;
    };
    while (!list.empty() && (t < n || s >= 0)) {
      if (out_of_work() || list.size() > most) return false;
      Found found;
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
      if (t < n) {
        const std::size_t at = t++;
        if (worth(items_[at], 1)) {
          expand(list, next, arena, static_cast<std::int32_t>(at), items_[at].w, items_[at].p, 0, true, found,
                 keep);
          list.swap(next);
          grown = true;
        }
      }
      note(base, arena, found);
      found = {};
      if (s >= 0) {
        const std::size_t at = static_cast<std::size_t>(s--);
        if (worth(items_[at], -1)) {
          expand(list, next, arena, static_cast<std::int32_t>(at), -items_[at].w, -items_[at].p, 0, true, found,
                 keep);
          list.swap(next);
          grown = true;
        }
      }
      note(base, arena, found);
      if (z_ > before && z_ >= bound_) return true;
      if (grown) arena.tidy(list);
    }
    return true;
  }

  // ---- lift: two lists joined --------------------------------------------------------------------

  // Undominated exchanges over some items: sorted by weight, values strictly rising.
  void exchanges(const std::vector<std::int32_t>& order, std::size_t from, std::size_t step, std::size_t most,
                 const std::vector<char>& base, std::vector<State>& list, Arena& arena) {
    list.assign(1, {0, 0, 0, Arena::none});
    std::vector<State> next;
    for (std::size_t i = from; i < order.size() && list.size() * 2 <= most; i += step) {
      const Item& item = items_[order[i]];
      const i64 sign = base[order[i]] ? -1 : 1;
      merge_plain(list, next, arena, order[i], sign * item.w, sign * item.p);
      list.swap(next);
    }
  }

  void merge_plain(const std::vector<State>& in, std::vector<State>& out, Arena& arena, std::int32_t item,
                   i64 dw, i64 dp) {
    out.clear();
    work_ += static_cast<i64>(2 * in.size());
    std::size_t i = 0, j = 0;
    const std::size_t n = in.size();
    i64 last = std::numeric_limits<i64>::min();
    while (i < n || j < n) {
      const bool shifted =
          i == n || (j < n && (in[j].w + dw < in[i].w || (in[j].w + dw == in[i].w && in[j].p + dp > in[i].p)));
      State s = shifted ? in[j++] : in[i++];
      if (shifted) {
        s.w += dw;
        s.p += dp;
      }
      if (s.p <= last) continue;
      last = s.p;
      if (shifted) s.node = arena.add(s.node, item);
      out.push_back(s);
    }
  }

  // Tries every pair of exchanges, one from each of two lists of up to `most` around `base`.
  void lift(const std::vector<std::int32_t>& order, const std::vector<char>& base, std::size_t most) {
    i64 w0 = 0, p0 = 0;
    for (std::size_t j = 0; j < items_.size(); ++j)
      if (base[j]) {
        w0 += items_[j].w;
        p0 += items_[j].p;
      }
    Arena left_arena, right_arena;
    std::vector<State> left, right;
    exchanges(order, 0, 2, most, base, left, left_arena);
    exchanges(order, 1, 2, most, base, right, right_arena);
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

  // ---- branch: cardinality -----------------------------------------------------------------------

  struct Multipliers {
    int shift = 0;
    i64 lambda = 0, mu = 0;  // scaled by 2^shift; value of a unit of weight, of an item held
    i64 k = 0;               // at most (mu >= 0) or at least (mu <= 0) so many items
    bool at_most = true;
    i64 bound = 0;
  };

  // LP over values p - mu·count: the efficiency at which the capacity is used up, and the items held.
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

  // The multipliers that give the least bound for one branch.
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
    // The rounding of multipliers moves the bound a little: try the neighbourhood on whole numbers too.
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

  void branch() {
    i64 held = 0;
    for (std::size_t j = 0; j < break_; ++j) held += items_[j].count;
    if (break_ < items_.size()) {
      const Item& b = items_[break_];
      held += static_cast<i64>(static_cast<i128>(b.count) * (c_ - break_w_) / b.w);
    }
    Multipliers few = multipliers(held, true), many = multipliers(held + 1, false);
    for (Multipliers* m : {&few, &many}) m->bound = std::min(m->bound, bound_);
    Branch branches[2] = {start(few), start(many)};
    if (few.bound < many.bound) std::swap(branches[0], branches[1]);
    // A few lifts and a small search settle most; what is left gets more of both.
    int attempt = 0;
    for (const auto& [until, states] : {std::pair<int, std::size_t>{3, 200'000}, {60, limits_.states}}) {
      const int first = attempt;
      for (Branch& b : branches) {
        for (attempt = first; attempt < until && b.m.bound > z_ && !out_of_work(); ++attempt) {
          const Filling f = fill(b, attempt);
          lift(f.order, f.chosen, attempt == 0 ? 4000 : attempt == 1 ? 40000 : 160000);
        }
      }
      for (Branch& b : branches)
        if (!b.done && b.m.bound > z_ && !out_of_work()) b.done = decide(b, states);
    }
    // A branch that was not finished may still be closed by what the other found.
    i64 proven = z_;
    for (const Branch& b : branches)
      if (!b.done) proven = std::max(proven, b.m.bound);
    bound_ = std::min(bound_, proven);
  }

  // One branch: its multipliers, what flipping each item away from the best relaxed choice loses, and
  // the items by that loss.
  struct Branch {
    Multipliers m;
    std::vector<i128> loss;
    std::vector<char> base;
    std::vector<std::int32_t> order;
    bool done = false;
  };

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

  // A choice with about as many items and as much weight as the branch allows: what is worth taking,
  // and of what is nearly indifferent a run of items, sorted by weight, that comes closest. `order`
  // names the items to exchange first: indifferent ones close to the ends of the run, so that a few
  // exchanges can make up for the room that is left, those in the run and those out of it in turns.
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
    // By weight for what is counted: what holds most for the least comes first.
    auto lean = [&](std::int32_t j) {
      return static_cast<double>(items_[j].w) / static_cast<double>(items_[j].count);
    };
    std::sort(loose.begin(), loose.end(), [&](std::int32_t a, std::int32_t b) {
      const double p = lean(a), q = lean(b);
      return p != q ? p < q : a < b;
    });
    // The run [from, to): items are added at the top while the cardinality is short, and the run
    // moves up while there is room.
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
      // Every attempt draws other items, from pools of other sizes.
      const double reach = static_cast<double>((c_ - w) >> (attempt % 4 + 1));
      const std::uint64_t salt = static_cast<std::uint64_t>(attempt) * 0xD1342543DE82EF95ull;
      std::size_t pool = std::min<std::size_t>(side.size(), 24 << (attempt % 3));
      while (pool < side.size() && far(side[pool]) <= reach) ++pool;
      std::sort(side.begin(), side.begin() + static_cast<std::ptrdiff_t>(pool),
                [&](std::int32_t a, std::int32_t b) {
                  const std::uint64_t p = mix(scramble(items_[a]) ^ salt), q = mix(scramble(items_[b]) ^ salt);
                  return p != q ? p < q : a < b;
                });
    }
    // Two at a time, so that each of the two lists, which take every second item, gets both kinds.
    for (std::size_t i = 0; i < std::max(sides[0].size(), sides[1].size()); i += 2)
      for (const auto& side : sides)
        for (std::size_t j = i; j < std::min(i + 2, side.size()); ++j) f.order.push_back(side[j]);
    return f;
  }

  // Decides items in the order of their loss; true when the branch is exhausted.
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
    // The Lagrangian value of a whole choice; what is undecided is at its best already.
    const i128 whole = static_cast<i128>(m.lambda) * c_ + static_cast<i128>(m.mu) * m.k;
    auto value = [&](const State& s) {
      return (static_cast<i128>(s.p) << m.shift) - static_cast<i128>(m.lambda) * s.w -
             static_cast<i128>(m.mu) * s.k + whole;
    };
    // What undecided items can still take off the weight, and add to the value.
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
      if (top - b.loss[at] < static_cast<i128>(z_ + 1) << m.shift) return true;  // nor any later one
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
        exchanges(later, 0, 1, 60000, b.base, right, other);
        join(b.base, 0, 0, list, arena, right, other);
        if (m.bound <= z_) return true;
      }
      if (list.size() > states) return false;
      arena.tidy(list);
    }
    return true;
  }

  // ---- the end -----------------------------------------------------------------------------------

  Outcome finish() {
    Outcome out;
    out.saved = taken_;
    for (std::size_t j = 0; j < items_.size(); ++j)
      if (best_[j])
        for (i64 k = 0; k < items_[j].size; ++k)
          out.saved.push_back(members_[static_cast<std::size_t>(items_[j].first + k)]);
    std::sort(out.saved.begin(), out.saved.end());
    i64 free = 0;
    for (std::int32_t i : taken_) free += values_[static_cast<std::size_t>(i)];
    for (std::int32_t i : out.saved) out.value += values_[static_cast<std::size_t>(i)];
    bound_ = std::max(bound_, z_);
    out.bound = free + bound_ * value_unit_;
    out.optimal = bound_ == z_;
    out.by_clock = by_clock_ && !out.optimal;
    out.work = work_;
    return out;
  }
};

}  // namespace remat
