// A lower bound on the loss of filling a given capacity exactly, by any exchanges.
//
// Gomory's group relaxation (1969), with the weight of the break item as the modulus: taking or leaving
// one more such item costs nothing, so only the remainder of the room counts. An exchange fills some of
// it at its loss; room may stay empty at the price of capacity. A subadditive function that charges no
// exchange more than its loss charges no set of exchanges more than their losses, so its value at a room
// is a lower bound. It is the shortest path on a grid of remainders, interpolated linearly, which keeps
// it subadditive (Gomory, Johnson 1972).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "states.hpp"

namespace remat {

class Residual {
 public:
  struct Exchange {
    i64 dw;       // change of the weight
    double loss;  // decrease of the relaxed value
  };

  static constexpr int kCells = 1024;
  static constexpr i64 kWork = static_cast<i64>(kCells) * kCells / 4;  // a build's, in states

  // `price`: of a unit of capacity. Losses and price are at least 0.
  void build(const std::vector<Exchange>& exchanges, double price, i64 period) {
    period_ = period;
    cells_ = static_cast<int>(std::min<i64>(kCells, period));
    least_.assign(static_cast<std::size_t>(cells_) + 1, 0.0);
    if (cells_ < 2) return;
    close(steps(exchanges, price));
  }

  // A lower bound on the loss of any exchanges that leave exactly this much room filled or paid for.
  double at(i64 room) const {
    i64 d = room % period_;
    if (d < 0) d += period_;
    const double x = static_cast<double>(d) * (static_cast<double>(cells_) / static_cast<double>(period_));
    const int cell = std::min(static_cast<int>(x), cells_ - 1);
    const double* v = least_.data() + cell;
    return v[0] + (x - cell) * (v[1] - v[0]);
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr double kMargin = 1e-9;  // far above what rounding amounts to, far below one unit of value

  // An exchange between two points of the grid: how far it is from either, and its loss.
  struct Between {
    int cell;
    double after, before, loss;
  };

  // What a step to each point of the grid may cost, so that no exchange is charged above its loss.
  std::vector<double> steps(const std::vector<Exchange>& exchanges, double price) const {
    const int g = cells_;
    // Slopes at both ends: exact, because small exchanges, many of them, decide what the bound is worth.
    double first = price * static_cast<double>(period_) / g, last = kInfinity;
    std::vector<Between> inner;
    inner.reserve(exchanges.size());
    for (const Exchange& e : exchanges) {
      i64 d = e.dw % period_;
      if (d < 0) d += period_;
      if (d == 0) continue;
      const i128 x = static_cast<i128>(d) * g;
      const int cell = static_cast<int>(x / period_);
      const i64 part = static_cast<i64>(x % period_);
      const double after = static_cast<double>(part) / static_cast<double>(period_);
      const double before = static_cast<double>(period_ - part) / static_cast<double>(period_);
      if (cell == 0) {
        first = std::min(first, e.loss / after);
      } else if (cell == g - 1) {
        last = std::min(last, e.loss / before);
      } else {
        inner.push_back({cell, after, before, e.loss});
      }
    }
    std::vector<double> step(static_cast<std::size_t>(g), kInfinity);
    auto lower = [&](int point, double cost) {
      double& at = step[static_cast<std::size_t>(point)];
      at = std::min(at, cost);
    };
    lower(1, first);
    lower(g - 1, last);
    const double down = std::min(last, first * (g - 1));
    for (const Between& b : inner) {
      if (b.after == 0) {
        lower(b.cell, b.loss);
        continue;
      }
      // Between two points the function rises by no more than `first` and falls by no more than `down`
      // a cell, so either point alone may carry the exchange. The better one is where the function runs
      // in that direction; a chord from the nearer end is a guess at that.
      const double x = b.cell + b.after;
      const bool rising = b.after * (first - b.loss / x) <= b.before * (down - b.loss / (g - x));
      const double off = rising ? b.after * first : b.before * down;
      if (off >= b.loss) {
        lower(b.cell, b.loss);
        lower(b.cell + 1, b.loss);
      } else {
        lower(rising ? b.cell : b.cell + 1, b.loss - off);
      }
    }
    return step;
  }

  // Shortest paths from 0 around the grid (Dijkstra's, on a complete graph). Every point is reached: by
  // steps of one.
  void close(const std::vector<double>& step) {
    const std::size_t g = step.size();
    std::vector<double> cost(step);
    std::vector<char> settled(g, 0);
    double top = 0;
    for (std::size_t round = 1; round < g; ++round) {
      std::size_t u = 0;
      double least = kInfinity;
      for (std::size_t v = 1; v < g; ++v) {
        if (settled[v] || cost[v] >= least) continue;
        least = cost[v];
        u = v;
      }
      if (u == 0) break;
      settled[u] = 1;
      top = least;
      for (std::size_t s = 1; s < g - u; ++s) cost[u + s] = std::min(cost[u + s], least + step[s]);
      for (std::size_t s = g - u + 1; s < g; ++s) cost[u + s - g] = std::min(cost[u + s - g], least + step[s]);
    }
    for (std::size_t v = 1; v < g; ++v) least_[v] = std::max(0.0, cost[v] * (1 - kMargin) - top * kMargin);
  }

  i64 period_ = 1;
  int cells_ = 1;
  std::vector<double> least_{0.0, 0.0};  // by point of the grid
};

}  // namespace remat
