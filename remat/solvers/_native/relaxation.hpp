// The linear relaxation of a knapsack, and the better of two greedy choices, in exact integers.
// `remat/solvers/knapsack/bounds.py` computes exactly the same in Python if the kernel was not compiled.
#pragma once

#include <algorithm>
#include <vector>

#include "integers.hpp"

namespace remat {

struct Relaxation {
  std::vector<i64> order;  // items that fit on their own, by value per weight, best first; ties by index
  i64 bound = 0;           // no choice has a greater value
  std::vector<i64> saved;  // sorted items of a feasible choice with at least half the optimal value
  i64 value = 0;           // total value of `saved`
};

// Items that fit on their own, by value per weight, best first. Items of weight 0 come first; ties by index.
inline std::vector<i64> efficiency_order(const std::vector<i64>& weights, const std::vector<i64>& values,
                                         i64 capacity) {
  struct Key {
    double approximate;
    i64 item;
  };
  std::vector<Key> keys;
  keys.reserve(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] > capacity) continue;
    const double ratio = weights[i] ? static_cast<double>(values[i]) / static_cast<double>(weights[i]) : 1e300;
    keys.push_back({ratio, static_cast<i64>(i)});
  }
  // Compare quotients as doubles, which are exact to a few units in the last place. If two doubles are too close
  // to tell, compare exactly.
  const auto before = [&](const Key& a, const Key& b) {
    const double margin = 1e-14 * (a.approximate > b.approximate ? a.approximate : b.approximate);
    if (a.approximate > b.approximate + margin) return true;
    if (b.approximate > a.approximate + margin) return false;
    const auto i = static_cast<std::size_t>(a.item), j = static_cast<std::size_t>(b.item);
    if (weights[i] && weights[j]) {
      const i128 left = static_cast<i128>(values[i]) * weights[j];
      const i128 right = static_cast<i128>(values[j]) * weights[i];
      if (left != right) return left > right;
    } else if (weights[i] != weights[j]) {
      return weights[i] == 0;
    }
    return a.item < b.item;
  };
  std::sort(keys.begin(), keys.end(), before);
  std::vector<i64> order(keys.size());
  std::transform(keys.begin(), keys.end(), order.begin(), [](const Key& k) { return k.item; });
  return order;
}

inline Relaxation relax(const std::vector<i64>& weights, const std::vector<i64>& values, i64 capacity) {
  const auto w = [&](i64 i) { return weights[static_cast<std::size_t>(i)]; };
  const auto v = [&](i64 i) { return values[static_cast<std::size_t>(i)]; };
  Relaxation out;
  out.order = efficiency_order(weights, values, capacity);
  i64 room = capacity;
  for (const i64 i : out.order) {
    if (w(i) > room) {
      out.bound += static_cast<i64>(static_cast<i128>(v(i)) * room / w(i));
      break;
    }
    room -= w(i);
    out.bound += v(i);
  }
  const auto fill = [&](i64 except, i64 left) {
    for (const i64 i : out.order) {
      if (i == except || w(i) > left) continue;
      left -= w(i);
      out.saved.push_back(i);
      out.value += v(i);
    }
  };
  fill(-1, capacity);
  i64 best = -1;  // the most valuable item; ties by least weight, then by index
  for (const i64 i : out.order) {
    if (best < 0 || v(i) > v(best) || (v(i) == v(best) && (w(i) < w(best) || (w(i) == w(best) && i < best)))) best = i;
  }
  if (best >= 0 && v(best) > out.value) {
    out.saved.assign(1, best);
    out.value = v(best);
    fill(best, capacity - w(best));
  }
  std::sort(out.saved.begin(), out.saved.end());
  return out;
}

}  // namespace remat
