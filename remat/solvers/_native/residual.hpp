// A lower bound on the loss of using up a given capacity (the *room*), by any set of exchanges.
//
// The bound is Gomory's group relaxation (1969), with the weight of the break item as the modulus. Taking or leaving
// another item of this weight costs nothing, so only the remainder of the room matters. An exchange uses up some
// room and costs its loss. Room may also stay unused, at the price of capacity. Consider a subadditive function
// of the room that charges no exchange more than its loss. By subadditivity, the function charges no set of exchanges
// more than the sum of their losses, so its value at a room is a lower bound. The function used here is the length of
// shortest paths on a grid of remainders. Linear interpolation between grid points keeps the function subadditive
// (Gomory, Johnson 1972).
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
  static constexpr i64 kWork = static_cast<i64>(kCells) * kCells / 4;  // work of one `build`, in states

  // `price` is the price of a unit of capacity, and `period` the modulus. Losses and price are at least 0.
  void build(const std::vector<Exchange>& exchanges, double price, i64 period) {
    period_ = period;
    cells_ = static_cast<int>(std::min<i64>(kCells, period));
    least_.assign(static_cast<std::size_t>(cells_) + 1, 0.0);
    if (cells_ < 2) return;
    close(steps(exchanges, price));
  }

  // A lower bound on the loss of any exchanges that use up this room; unused room counts at the price of capacity.
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
  static constexpr double kMargin = 1e-9;  // far above the rounding errors, far below one unit of value

  // An exchange whose remainder lies between two grid points: its distances from both, in cells, and its loss.
  struct Between {
    int cell;
    double after, before, loss;
  };

  // For each grid point, how much a step of this length may cost so that no exchange is charged above its loss.
  std::vector<double> steps(const std::vector<Exchange>& exchanges, double price) const {
    const int g = cells_;
    // The slopes of the function at both ends of the grid. They are exact, because the many small exchanges
    // determine how good the bound is.
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
      // Per cell, the function rises by at most `first` and falls by at most `down`. So a limit at one of the two
      // grid points suffices for the exchange. The lower point is better where the function rises, the upper one
      // where it falls. The direction is guessed from chords to the ends of the grid.
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

  // Shortest paths from 0 around the grid, by Dijkstra's algorithm on a complete graph. Every point is reached,
  // because steps of one cell have a finite cost.
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
  std::vector<double> least_{0.0, 0.0};  // bound at each grid point
};

}  // namespace remat
