// State shared by all stages of a search: the prepared problem, the incumbent, and the limits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <vector>

#include "interrupt.hpp"
#include "states.hpp"

namespace remat {

class Search {
 public:
  Search(const std::vector<i64>& weights, const std::vector<i64>& values, i64 capacity, Limits limits)
      : weights_(weights), values_(values), capacity_(capacity), limits_(limits) {
    start_ = std::chrono::steady_clock::now();
  }

 protected:
  const std::vector<i64>& weights_;
  const std::vector<i64>& values_;
  i64 capacity_;
  Limits limits_;
  std::chrono::steady_clock::time_point start_;

  std::vector<std::int32_t> taken_;    // positions, in the caller's arrays, of weight 0: always saved
  std::vector<std::int32_t> members_;  // positions, in the caller's arrays, of the items in each bundle
  std::vector<Item> items_;            // by value per weight, best first
  i64 c_ = 0;                          // capacity in units of the common divisor
  i64 value_unit_ = 1;                 // common divisor of the values
  i64 z_ = 0;                          // value of the incumbent, in units of value_unit_
  std::vector<char> best_;             // the incumbent: by item, whether it is saved
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

  // A fixed pseudo-random order, so that the first few of several equally good items are a fair sample.
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

  // Shuffle positions into an order that depends only on the items and the salt.
  void shuffle(std::vector<std::int32_t>::iterator from, std::vector<std::int32_t>::iterator to,
               std::uint64_t salt) const {
    std::sort(from, to, [&](std::int32_t a, std::int32_t b) {
      const std::uint64_t p = mix(scramble(items_[a]) ^ salt), q = mix(scramble(items_[b]) ^ salt);
      return p != q ? p < q : a < b;
    });
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

  // Items are strongly correlated if each value is the weight plus a multiple of one large unit. Return this unit,
  // negative if all values are below the weights, or 0 if there is none. A tight bound must count the multiples.
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

  // ---- where every search starts -----------------------------------------------------------------

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
    // The first incumbent: fill the remaining capacity greedily with later items.
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

  bool out_of_work() {
    if (stopped_) return true;
    listen();
    if (work_ > limits_.work) stopped_ = true;
    if (limits_.seconds > 0) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
      if (spent.count() > limits_.seconds) stopped_ = by_clock_ = true;
    }
    return stopped_;
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
    return out;
  }
};

}  // namespace remat
