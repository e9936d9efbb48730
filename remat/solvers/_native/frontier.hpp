// All Pareto-optimal (weight, value) pairs of a 0/1 knapsack, after Nemhauser and Ullmann (1969).
//
// For each item, the list of undominated pairs is merged with a copy of the list to which the item is added.
// If the list becomes too long, it is thinned: a pair is dropped if a lighter pair has nearly the same value.
// `tolerance` gives the resulting relative error of the values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "interrupt.hpp"
#include "knapsack.hpp"

namespace remat {

class Frontier {
 public:
  Frontier(const std::vector<i64>& weights, const std::vector<i64>& values, i64 capacity, std::size_t most)
      : most_(std::max<std::size_t>(most, 16)) {
    std::map<std::pair<i64, i64>, std::vector<std::int32_t>> groups;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto at = static_cast<std::int32_t>(i);
      if (values[i] == 0 || weights[i] > capacity) continue;
      if (weights[i] == 0) {
        free_.push_back(at);
        free_value_ += values[i];
      } else {
        groups[{weights[i], values[i]}].push_back(at);
      }
    }
    points_.push_back({0, free_value_, 0, Arena::none});
    // Only the number of identical items matters, not which of them are taken. So they are grouped into bundles
    // of 1, 2, 4, … items, which can make up any number.
    for (const auto& [kind, members] : groups) {
      std::int64_t left = static_cast<std::int64_t>(members.size());
      std::size_t at = 0;
      for (std::int64_t bundle = 1; left > 0; bundle *= 2) {
        const std::int64_t size = std::min(bundle, left);
        left -= size;
        if (kind.first > capacity / size) {
          at += static_cast<std::size_t>(size);
          continue;
        }
        bundles_.emplace_back(members.begin() + static_cast<std::ptrdiff_t>(at),
                              members.begin() + static_cast<std::ptrdiff_t>(at + static_cast<std::size_t>(size)));
        at += static_cast<std::size_t>(size);
        const i64 w = kind.first * size;
        merge_shifted(points_, next_, arena_, static_cast<std::int32_t>(bundles_.size() - 1), w, kind.second * size,
                      [&](const State& s) { return s.w <= capacity - w; }, any);
        points_.swap(next_);
        listen();
        work_ += points_.size();
        // After many merged points, keep fewer points, so that the remaining items do not take too long.
        if (work_ > kMuchWork) most_ = std::min(most_, kFewPoints);
        if (points_.size() > most_) thin();
        arena_.tidy(points_);
      }
    }
  }

  const std::vector<State>& points() const { return points_; }
  double tolerance() const { return factor_ - 1.0; }

  std::vector<std::int32_t> items(std::size_t i) const {
    std::vector<std::int32_t> out = free_;
    arena_.walk(points_.at(i).node, [&](std::int32_t b) {
      const auto& members = bundles_[static_cast<std::size_t>(b)];
      out.insert(out.end(), members.begin(), members.end());
    });
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  static constexpr std::size_t kMuchWork = 4'000'000, kFewPoints = 32'768;
  std::size_t most_;
  std::size_t work_ = 0;
  double factor_ = 1.0;
  double step_ = 0.0;
  i64 free_value_ = 0;
  std::vector<std::int32_t> free_;
  std::vector<std::vector<std::int32_t>> bundles_;
  std::vector<State> points_, next_;
  Arena arena_;

  // Keep at most half of the allowed points: each whose value is above `1 + step` times that of the last one kept.
  void thin() {
    // Start near the step of the previous thinning, which is a good guess.
    for (double step = std::max(1e-9, step_ / 16);; step *= 4) {
      next_.assign(1, points_[0]);
      for (const State& point : points_) {
        const double reach = static_cast<double>(next_.back().p) * (1 + step);
        if (static_cast<double>(point.p) > reach) next_.push_back(point);
      }
      if (next_.size() > most_ / 2) continue;
      points_.swap(next_);
      factor_ *= 1 + step;
      step_ = step;
      return;
    }
  }
};

}  // namespace remat
