// Simulated annealing over schedules of a schedule problem. A schedule is a sequence of runs in which a node
// may occur several times. An edit moves one run, adds a recomputation, or drops a run. Some changes need
// several edits at once: a recomputation with some of its inputs, or one recomputation in exchange for another.
//
// Memory is stored per gap: gap[p] holds the bytes that are alive between positions p and p + 1. During
// the run at position p, memory holds gap[p - 1], the results of the run and its extra bytes. An edit is
// evaluated on the positions that it changes, before the state is changed.
//
// Bytes over the capacity have an adaptive price, which rises while a position is over the capacity and
// falls otherwise. The price applies from a margin below the capacity on; the margin shrinks as the search
// cools. Without the margin, schedules would stay near the capacity, because nearly all schedules do.
//
// At the end, runs return to the order of the start wherever the capacity allows, see `tidy`.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace remat {

// Nodes read values and make values. Every other constraint of a problem (values that exist from the start
// or stay to the end, fixed orders) is expressed by additional nodes and by values of 0 bytes. The first and
// the last node of a sequence never move.
struct ScheduleGraph {
  std::vector<double> cost;                // of one run, by node
  std::vector<double> extra;               // bytes that a run takes besides inputs and results, by node
  std::vector<std::int64_t> once;          // 1 if the node may not run again, by node
  std::vector<std::vector<int>> reads;     // the values that the node reads, by node
  std::vector<std::vector<int>> makes;     // the values that the node makes, by node
  std::vector<std::vector<int>> readers;   // the nodes that read the value, by value
  std::vector<int> maker;                  // the node that makes the value, by value
  std::vector<double> size;                // bytes, by value

  int nodes() const { return static_cast<int>(cost.size()); }
  int values() const { return static_cast<int>(size.size()); }
};

class Annealer {
 public:
  struct Limits {
    std::uint64_t seed;  // of the random numbers
    std::int64_t moves;  // edits tried
    double seconds;      // 0: no clock
    double hot, cold;    // first and last temperature, in mean costs of a node
    double wide, narrow; // first and last margin below the capacity, as fractions of the capacity
    double price;        // first price of a mean node's bytes over the capacity, in mean costs of a node
  };
  struct Result {
    bool feasible = false;  // if false, `sequence` is the sequence with the lowest peak
    bool by_clock = false;
    double cost = 0;
    double peak = 0;
    std::vector<int> sequence;
  };

  Annealer(const ScheduleGraph& graph, double capacity) : g_(graph), capacity_(capacity) {
    const auto n = static_cast<std::size_t>(g_.nodes());
    own_.assign(n, 0.0);
    first_.assign(n, 0);
    last_.assign(n, 0);
    double bytes = 0;
    for (std::size_t v = 0; v < n; ++v) {
      own_[v] = g_.extra[v];
      for (int x : g_.makes[v]) own_[v] += g_.size[static_cast<std::size_t>(x)];
      bytes += own_[v];
      least_ += g_.cost[v];
    }
    mean_cost_ = std::max(1.0, least_ / static_cast<double>(std::max<std::size_t>(1, n)));
    mean_bytes_ = std::max(1.0, bytes / static_cast<double>(std::max<std::size_t>(1, n)));
  }

  // `start` must be a legal sequence. If another thread sets `stop`, the search ends as if time were up.
  Result run(const std::vector<int>& start, const Limits& limits, const std::atomic<bool>& stop) {
    load(start);
    random_ = limits.seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
    const auto began = std::chrono::steady_clock::now();
    price_ = limits.price * mean_cost_ / mean_bytes_;
    margin(limits.wide);
    note();
    const std::int64_t turn = std::max<std::int64_t>(200, g_.nodes() / 2);
    // The price changes slowly enough for the search to follow, by a factor of at most e^10 in total.
    const double factor = std::exp(10.0 * static_cast<double>(turn) / static_cast<double>(limits.moves));
    for (std::int64_t done = 0; done < limits.moves && !(best_.feasible && best_.cost <= least_); done += turn) {
      const double share = static_cast<double>(done) / static_cast<double>(limits.moves);
      const double t = mean_cost_ * limits.hot * std::pow(limits.cold / limits.hot, share);
      margin(limits.wide * std::pow(limits.narrow / limits.wide, share));
      bool late = false;
      for (std::int64_t k = 0; k < turn && !late; ++k) {
        step(t);
        if ((k & 255) == 255) late = stop.load(std::memory_order_relaxed) || over_time(began, limits.seconds);
      }
      price_ *= over_ > 0 ? factor : 1 / factor;
      if (late || stop.load(std::memory_order_relaxed) || over_time(began, limits.seconds)) {
        best_.by_clock = true;
        break;
      }
    }
    tidy(start);
    return best_;
  }

 private:
  static bool over_time(std::chrono::steady_clock::time_point began, double seconds) {
    return seconds > 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() > seconds;
  }

  enum class Kind { move, add, drop };
  // move: the run of `node` from position i to j; add: a new run at j; drop: the run at i.
  struct Edit {
    Kind kind;
    int node, i, j;
  };
  struct Span {
    int from, to;  // alive across the gaps from .. to - 1
  };

  // ---- random numbers -----------------------------------------------------------------------------
  std::uint64_t next() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }
  int below(int n) { return static_cast<int>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32); }
  double unit() { return static_cast<double>(next() >> 11) * (1.0 / 9007199254740992.0); }

  // ---- state --------------------------------------------------------------------------------------
  int length() const { return static_cast<int>(sequence_.size()); }

  void load(const std::vector<int>& start) {
    best_ = Result();
    sequence_ = start;
    runs_.assign(g_.cost.size(), {});
    count_.assign(g_.cost.size(), 0);
    again_.clear();
    cost_ = 0;
    for (int p = 0; p < length(); ++p) {
      const int v = sequence_[p];
      if (count_[v] > 0) again_.push_back(v);
      put(v, p);
      cost_ += g_.cost[v];
    }
    std::vector<double> change(sequence_.size() + 1, 0.0);
    const Edit none{Kind::move, -1, -1, -1};
    for (int x = 0; x < g_.values(); ++x) {
      if (g_.size[x] == 0) continue;
      before_.clear();
      after_.clear();
      spans(x, none);
      for (const Span& s : before_) {
        change[s.from] += g_.size[x];
        change[s.to] -= g_.size[x];
      }
    }
    gap_.assign(sequence_.size(), 0.0);
    load_.assign(sequence_.size(), 0.0);
    double now = 0;
    for (std::size_t p = 0; p < sequence_.size(); ++p) gap_[p] = now += change[p];
    excess_.assign(sequence_.size(), 0.0);
    over_at_.assign(sequence_.size(), 0);
    over_ = 0;
  }

  // The ascending positions of a node's runs. Nearly all nodes run once, and their only position is in `first_`.
  struct Runs {
    const int *from, *to;
    const int* begin() const { return from; }
    const int* end() const { return to; }
    std::size_t size() const { return static_cast<std::size_t>(to - from); }
    int operator[](std::size_t k) const { return from[k]; }
  };
  Runs runs(int v) const {
    if (count_[v] > 1) return {runs_[v].data(), runs_[v].data() + runs_[v].size()};
    return {&first_[v], &first_[v] + count_[v]};  // a node without runs of its own gives an empty range
  }

  int next_run(int v, int p) const {  // the position of the first run of v after p; the length if there is none
    const Runs mine = runs(v);
    const int* after = std::upper_bound(mine.begin(), mine.end(), p);
    return after == mine.end() ? length() : *after;
  }

  void put(int v, int p) {  // record a further run of v at p
    if (++count_[v] == 1) {
      first_[v] = last_[v] = p;
      return;
    }
    auto& mine = runs_[v];
    if (count_[v] == 2) mine.assign(1, first_[v]);
    mine.insert(std::lower_bound(mine.begin(), mine.end(), p), p);
    ends(v);
  }

  void take(int v, int p) {  // remove the run of v at p
    auto& mine = runs_[v];
    mine.erase(std::find(mine.begin(), mine.end(), p));
    --count_[v];
    ends(v);
  }

  void ends(int v) {
    first_[v] = runs_[v].front();
    last_[v] = runs_[v].back();
  }

  void margin(double share) {
    floor_ = (1 - share) * capacity_;
    scale_ = 1 / std::max(1.0, 2 * share * capacity_);
    refresh(0, length() - 1);
    blocks(0, length() - 1);
  }

  // The largest number of bytes in each block of positions. `changed` skips blocks that stay below the margin.
  void blocks(int from, int to) {
    most_.resize((sequence_.size() + kBlock - 1) / kBlock);
    for (int b = from / kBlock; b <= to / kBlock; ++b) {
      const int end = std::min(length(), (b + 1) * kBlock);
      double most[4] = {0, 0, 0, 0};  // four independent maxima, which the processor computes in parallel
      int p = b * kBlock;
      for (; p + 4 <= end; p += 4)
        for (int k = 0; k < 4; ++k) most[k] = std::max(most[k], load_[p + k]);
      for (; p < end; ++p) most[0] = std::max(most[0], load_[p]);
      most_[b] = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
    }
  }

  double penalty(double bytes) const {
    const double e = bytes > floor_ ? bytes - floor_ : 0.0;
    return e * e * scale_;
  }

  void refresh(int from, int to) {
    for (int p = from; p <= to; ++p) {
      const double bytes = load_[p] = (p ? gap_[p - 1] : 0.0) + own_[sequence_[p]];
      excess_[p] = penalty(bytes);
      const char over = bytes > capacity_;
      over_ += over - over_at_[p];
      over_at_[p] = over;
    }
  }

  void note() {
    if (over_ > 0 ? best_.feasible : best_.feasible && cost_ >= best_.cost) return;
    const double most = *std::max_element(most_.begin(), most_.end());
    if (over_ > 0 && !best_.sequence.empty() && most >= best_.peak) return;
    best_.feasible = over_ == 0;
    best_.cost = cost_;
    best_.peak = most;
    best_.sequence = sequence_;
  }

  // ---- the order of the result ----------------------------------------------------------------------
  // Return the place that each run of the sequence belongs to. Places are pairs, and runs are in order if
  // their places ascend. A first run has the place of its node in `start`. A recomputation belongs right
  // before its first reader; without a reader, it has the place of its node.
  std::vector<std::pair<int, int>> places(const std::vector<int>& start) const {
    std::vector<int> rank(g_.cost.size(), -1);
    for (int p = 0; p < static_cast<int>(start.size()); ++p)
      if (rank[start[p]] < 0) rank[start[p]] = p;
    std::vector<std::pair<int, int>> found(sequence_.size());
    for (int p = length() - 1; p >= 0; --p) {
      const int v = sequence_[p];
      found[p] = {rank[v], 0};
      if (p == first_[v]) continue;
      const int reader = first_reader(v, p);
      if (reader < next_run(v, p)) found[p] = {found[reader].first, found[reader].second - 1};
    }
    return found;
  }

  // The first position after p that reads a result of the run of v at p; if there is none, the end of the sequence
  // or a position after v's next run. Values of 0 bytes count for the first run only: they stay alive from then on.
  int first_reader(int v, int p) const {
    int reader = length();
    for (int x : g_.makes[v])
      for (int w : g_.size[x] > 0 || p == first_[v] ? g_.readers[x] : kNone)
        for (int q : runs(w))
          if (q > p) reader = std::min(reader, q);
    return reader;
  }

  // Drop recomputations whose results are not read, and move runs of the best sequence forward to their places. If
  // moving a run the whole way exceeds the capacity, half of the way is tried, then a quarter, and so on. The search
  // leaves runs in arbitrary places if the places do not affect the cost. Costs that are not part of the problem, such
  // as those of kernels that can no longer be fused, are usually lower in the order of `start`.
  void tidy(const std::vector<int>& start) {
    if (best_.sequence == start) return;
    Result best = best_;
    load(best.sequence);
    capacity_ = std::max(capacity_, best.peak);  // an Annealer runs once, so the capacity is not restored
    margin(0);
    for (int p = length() - 2; p > 0; --p) {
      const int v = sequence_[p];
      const Edit e{Kind::drop, v, p, -1};
      if (runs(v).size() > 1 && first_reader(v, p) >= next_run(v, p) && judge(e) <= 0) apply(e);
    }
    auto place_of = places(start);
    for (int i = 2; i < length() - 1; ++i) {
      const int v = sequence_[i];
      int low = 1;
      for (int x : g_.reads[v]) low = std::max(low, first_[g_.maker[x]] + 1);
      for (int p : runs(v))
        if (p < i) low = std::max(low, p + 1);
      int j = i;
      while (j > low && place_of[j - 1] > place_of[i]) --j;
      for (; j < i; j += (i - j + 1) / 2) {
        const Edit e{Kind::move, v, i, j};
        if (judge(e) > 0) continue;
        apply(e);
        std::rotate(place_of.begin() + j, place_of.begin() + i, place_of.begin() + i + 1);
        break;
      }
    }
    best.sequence = sequence_;
    best.cost = cost_;
    best.peak = *std::max_element(most_.begin(), most_.end());
    best_ = best;
  }

  // ---- what an edit changes -----------------------------------------------------------------------
  // The position after the edit of the run at p. For the run that the edit moves or drops, the result is its
  // old position, which another run then takes.
  static int moved(const Edit& e, int p) {
    switch (e.kind) {
      case Kind::add: return p + (p >= e.j);
      case Kind::drop: return p - (p > e.i);
      case Kind::move: break;
    }
    if (e.j > e.i) return p - (p > e.i && p <= e.j);
    return p + (p >= e.j && p < e.i);
  }

  // Compute the sorted lifetimes of value x, all in positions after the edit. `before_` gets the lifetimes
  // without the edit, which the gaps still count, and `after_` the lifetimes with the edit.
  void spans(int x, const Edit& e) {
    const int m = g_.maker[x];
    const Runs makes = runs(m);
    if (makes.size() == 1 && !(m == e.node && e.kind == Kind::add)) {
      const int p = makes[0];
      int old = p, now = m == e.node ? e.j : moved(e, p);
      for (int w : g_.readers[x]) {
        const int q = last_[w];
        old = std::max(old, q);
        if (w != e.node) {
          now = std::max(now, moved(e, q));
          continue;
        }
        now = std::max(now, own_last_);
      }
      before_.push_back({moved(e, p), moved(e, old)});
      after_.push_back({m == e.node ? e.j : moved(e, p), now});
      return;
    }
    const std::size_t at = before_.size(), to = after_.size();
    for (int p : makes) before_.push_back({p, p});
    bool placed = m != e.node || e.kind == Kind::drop;
    for (int p : makes) {
      const bool mine = m == e.node && p == e.i;
      if (mine && e.kind == Kind::drop) continue;
      const int q = mine ? e.j : moved(e, p);
      if (!placed && !mine && e.kind == Kind::add && e.j <= q) {
        after_.push_back({e.j, e.j});
        placed = true;
      }
      after_.push_back({q, q});
    }
    if (m == e.node && e.kind == Kind::add && !placed) after_.push_back({e.j, e.j});
    const auto reach = [](std::vector<Span>& all, std::size_t from, int q) {
      std::size_t k = all.size() - 1;
      while (k > from && all[k].from >= q) --k;
      if (all[k].to < q) all[k].to = q;
    };
    for (int w : g_.readers[x]) {
      for (int q : runs(w)) {
        reach(before_, at, q);
        const bool mine = w == e.node && q == e.i;
        if (mine && e.kind == Kind::drop) continue;
        reach(after_, to, mine ? e.j : moved(e, q));
      }
      if (w == e.node && e.kind == Kind::add) reach(after_, to, e.j);
    }
    for (std::size_t k = at; k < before_.size(); ++k) {
      before_[k].from = moved(e, before_[k].from);
      before_[k].to = moved(e, before_[k].to);
    }
  }

  // The position of the edited node's last run after the edit.
  int last_after(const Edit& e) const {
    const Runs mine = runs(e.node);
    const int last = last_[e.node];
    if (last == e.i) return e.kind == Kind::move ? e.j : moved(e, mine[mine.size() - 2]);
    return e.kind == Kind::add ? std::max(e.j, moved(e, last)) : moved(e, last);
  }

  void differ(int from, int to, double bytes) {  // the gaps from .. to - 1 hold `bytes` more
    if (from < to) {
      steps_.push_back({from, bytes});
      steps_.push_back({to, -bytes});
      low_ = std::min(low_, from);
      high_ = std::max(high_, to);
    }
  }

  // Return by how much an edit changes the sum of the penalties. The changes of the gaps go to `steps_`, by
  // positions after the edit.
  double judge(const Edit& e) {
    steps_.clear();
    low_ = e.kind == Kind::move ? std::min(e.i, e.j) : e.kind == Kind::add ? e.j : e.i;
    high_ = e.kind == Kind::move ? std::max(e.i, e.j) : e.kind == Kind::add ? e.j : e.i - 1;
    own_last_ = last_after(e);
    for (int x : g_.reads[e.node]) compare(x, e);
    for (int x : g_.makes[e.node]) compare(x, e);
    std::sort(steps_.begin(), steps_.end());
    // The gaps from low_ to high_ - 1 change, and so do the loads of the runs from low_ to high_.
    double more = 0, sum = 0;
    std::size_t k = 0;
    for (int t = low_; t <= high_;) {
      while (k < steps_.size() && steps_[k].first < t) more += steps_[k++].second;
      int to = k < steps_.size() ? std::min(high_, steps_[k].first) + 1 : high_ + 1;
      if (t == e.j || t == e.i) {  // at the edited positions, compute the run's load anew
        const int from = source_run(e, t);
        const double gap = t == 0 ? 0.0 : gap_[source_gap(e, t - 1)];
        sum += penalty(gap + more + own_[from < 0 ? e.node : sequence_[from]]) - (from < 0 ? 0.0 : excess_[from]);
        to = t + 1;
      } else {
        if (t < e.i) to = std::min(to, e.i);
        if (t < e.j) to = std::min(to, e.j);
        const int shift = source_run(e, t) - t;
        sum += changed(t + shift, to + shift, more);
      }
      t = to;
    }
    if (e.kind == Kind::drop) sum -= excess_[e.i];
    return sum;
  }

  // Return by how much the penalties change if the positions from .. to - 1 hold `more` additional bytes.
  double changed(int from, int to, double more) const {
    if (more == 0) return 0;
    const double clear = floor_ - std::max(more, 0.0);
    double sum = 0;
    for (int p = from; p < to;) {
      const int end = std::min(to, (p / kBlock + 1) * kBlock);
      if (most_[p / kBlock] > clear)
        for (; p < end; ++p) sum += penalty(load_[p] + more) - excess_[p];
      p = end;
    }
    return sum;
  }

  // `source_gap`: the position that gap t had before the edit. `source_run`: the position that the run at t
  // had before the edit; -1 if the edit adds the run.
  static int source_gap(const Edit& e, int t) {
    switch (e.kind) {
      case Kind::add: return t - (t >= e.j);
      case Kind::drop: return t + (t >= e.i);
      case Kind::move: break;
    }
    if (e.j > e.i) return t + (t >= e.i && t < e.j);
    return t - (t >= e.j && t < e.i);
  }
  static int source_run(const Edit& e, int t) {
    switch (e.kind) {
      case Kind::add: return t == e.j ? -1 : t - (t > e.j);
      case Kind::drop: return t + (t >= e.i);
      case Kind::move: break;
    }
    if (t == e.j) return e.i;
    if (e.j > e.i) return t + (t >= e.i && t < e.j);
    return t - (t > e.j && t <= e.i);
  }

  void compare(int x, const Edit& e) {
    const double bytes = g_.size[x];
    if (bytes == 0) return;
    before_.clear();
    after_.clear();
    spans(x, e);
    if (before_.size() == 1 && after_.size() == 1) {
      const Span a = before_[0], b = after_[0];
      if (a.from >= a.to || b.from >= b.to || a.to <= b.from || b.to <= a.from) {
        differ(a.from, a.to, -bytes);
        differ(b.from, b.to, bytes);
        return;
      }
      differ(b.from, a.from, bytes);
      differ(a.from, b.from, -bytes);
      differ(a.to, b.to, bytes);
      differ(b.to, a.to, -bytes);
      return;
    }
    std::size_t k = 0;
    for (const Span& a : before_) {  // lifetimes with the same start can differ only in their end
      while (k < after_.size() && after_[k].from < a.from) {
        differ(after_[k].from, after_[k].to, bytes);
        ++k;
      }
      if (k < after_.size() && after_[k].from == a.from) {
        differ(a.to, after_[k].to, bytes);
        differ(after_[k].to, a.to, -bytes);
        ++k;
      } else {
        differ(a.from, a.to, -bytes);
      }
    }
    for (; k < after_.size(); ++k) differ(after_[k].from, after_[k].to, bytes);
  }

  // Apply the edit that `judge` has just evaluated.
  void apply(const Edit& e) {
    const int v = e.node;
    switch (e.kind) {
      case Kind::move: {
        if (e.j > e.i) {
          for (int p = e.i + 1; p <= e.j; ++p) place(sequence_[p], p, p - 1);
          std::move(sequence_.begin() + e.i + 1, sequence_.begin() + e.j + 1, sequence_.begin() + e.i);
          std::move(gap_.begin() + e.i + 1, gap_.begin() + e.j + 1, gap_.begin() + e.i);
        } else {
          for (int p = e.i - 1; p >= e.j; --p) place(sequence_[p], p, p + 1);
          std::move_backward(sequence_.begin() + e.j, sequence_.begin() + e.i, sequence_.begin() + e.i + 1);
          std::move_backward(gap_.begin() + e.j - 1, gap_.begin() + e.i - 1, gap_.begin() + e.i);
        }
        sequence_[e.j] = v;
        place(v, e.i, e.j);
        break;
      }
      case Kind::add: {
        for (int p = length() - 1; p >= e.j; --p) place(sequence_[p], p, p + 1);
        sequence_.insert(sequence_.begin() + e.j, v);
        gap_.insert(gap_.begin() + e.j, gap_[e.j - 1]);
        load_.insert(load_.begin() + e.j, 0.0);
        excess_.insert(excess_.begin() + e.j, 0.0);
        over_at_.insert(over_at_.begin() + e.j, 0);
        put(v, e.j);
        cost_ += g_.cost[v];
        break;
      }
      case Kind::drop: {
        over_ -= over_at_[e.i];
        take(v, e.i);
        for (int p = e.i + 1; p < length(); ++p) place(sequence_[p], p, p - 1);
        sequence_.erase(sequence_.begin() + e.i);
        gap_.erase(gap_.begin() + e.i);
        load_.erase(load_.begin() + e.i);
        excess_.erase(excess_.begin() + e.i);
        over_at_.erase(over_at_.begin() + e.i);
        cost_ -= g_.cost[v];
        break;
      }
    }
    double more = 0;
    for (std::size_t k = 0; k < steps_.size(); ++k) {
      more += steps_[k].second;
      const int to = k + 1 < steps_.size() ? steps_[k + 1].first : high_;
      if (more != 0)
        for (int t = steps_[k].first; t < to; ++t) gap_[t] += more;
    }
    refresh(low_, high_);
    blocks(low_, e.kind == Kind::move ? high_ : length() - 1);
    if (over_ == 0 || !best_.feasible) note();
  }

  // Record that the run of node w moved from position p to q, without passing another run of w.
  void place(int w, int p, int q) {
    if (count_[w] == 1) {
      first_[w] = last_[w] = q;
      return;
    }
    *std::find(runs_[w].begin(), runs_[w].end(), p) = q;
    ends(w);
  }

  // ---- edits --------------------------------------------------------------------------------------
  void step(double t) {
    const int kind = below(64);
    const double chance = unit() + 1e-300;
    if (kind < 24) return move(t, chance);
    const double room = -t * std::log(chance);  // the largest worsening that is accepted
    if (kind < 32)
      add(room);
    else if (kind < 34)
      add_chain(room);
    else if (kind < 46)
      drop(room);
    else
      exchange(room);
  }

  void move(double t, double chance) {
    if (length() < 4) return;
    const int i = 1 + below(length() - 2), v = sequence_[i];
    int low = 1, high = length() - 2;
    static constexpr int kReach[] = {4, 16, 64, 1 << 29};
    const int reach = kReach[below(4)];
    low = std::max(low, i - reach);
    high = std::min(high, i + reach);
    for (int x : g_.reads[v]) low = std::max(low, first_[g_.maker[x]] + 1);
    const Runs mine = runs(v);
    const auto k = static_cast<std::size_t>(std::lower_bound(mine.begin(), mine.end(), i) - mine.begin());
    if (k + 1 < mine.size()) high = std::min(high, mine[k + 1] - 1);
    if (k > 0) low = std::max(low, mine[k - 1] + 1);
    if (k == 0)
      for (int x : g_.makes[v])
        for (int w : g_.readers[x]) high = std::min(high, first_[w] - 1);
    if (high <= low) return;
    int j = low + below(high - low);
    if (j >= i) ++j;
    const Edit e{Kind::move, v, i, j};
    const double worse = price_ * judge(e);
    if (worse <= 0 || worse <= -t * std::log(chance)) apply(e);
  }

  // The last position before q that makes or reads value x.
  int last_use(int x, int q) const {
    int last = 0;
    for (int p : runs(g_.maker[x]))
      if (p < q) last = p;
    for (int r : g_.readers[x])
      for (int p : runs(r))
        if (p < q && p > last) last = p;
    return last;
  }

  // Pick a value that a random run reads and that can be recomputed before it. Returns the position of the
  // run, or 0.
  int pick(int& x) {
    if (length() < 2) return 0;
    const int q = 1 + below(length() - 1);
    const auto& reads = g_.reads[sequence_[q]];
    if (reads.empty()) return 0;
    x = reads[below(static_cast<int>(reads.size()))];
    return g_.size[x] == 0 || g_.once[g_.maker[x]] ? 0 : q;
  }

  // Whether a recomputation of v at j may be worth its cost. The gain is estimated as if v's values were freed
  // between position `last`, their last use before j, and j.
  bool may_pay(int v, int last, int j, double room) const {
    const double bytes = own_[v] - g_.extra[v], worth = g_.cost[v] - room;
    double gain = 0;
    for (int p = last + 1; p < j && gain * price_ < worth;) {
      const int end = std::min(j, (p / kBlock + 1) * kBlock);
      gain -= changed(p, end, -bytes);
      p = end;
    }
    return gain * price_ >= worth;
  }

  void add(double room) {
    int x = 0;
    const int q = pick(x);
    if (q == 0) return;
    const int v = g_.maker[x], last = last_use(x, q);
    int low = last + 1;
    for (int y : g_.reads[v]) low = std::max(low, first_[g_.maker[y]] + 1);
    if (low > q || q - last < 2) return;
    const int j = (next() & 1) ? q : low + below(q - low + 1);
    if (!may_pay(v, last, j, room)) return;
    const Edit e{Kind::add, v, -1, j};
    if (g_.cost[v] + price_ * judge(e) > room) return;
    apply(e);
    again_.push_back(v);
  }

  void add_chain(double room) {
    int x = 0;
    const int q = pick(x);
    if (q == 0) return;
    const int last = last_use(x, q);
    if (q - last < 2 || !may_pay(g_.maker[x], last, q, room)) return;
    done_.clear();
    settle(grow(x, q), room);
  }

  void drop(double room) {
    int v = 0;
    const int i = pick_drop(v);
    if (i == 0) return;
    const Edit e{Kind::drop, v, i, -1};
    if (price_ * judge(e) - g_.cost[v] > room) return;
    apply(e);
    forget(v);
  }

  // Drop a run, and recompute another value instead. Dropping the run keeps the run's value alive from its last use
  // before the run; the other value is alive in that interval, too.
  void exchange(double room) {
    int v = 0;
    const int i = pick_drop(v);
    if (i == 0) return;
    int from = i;
    for (int x : g_.makes[v])
      if (g_.size[x] > 0) from = std::min(from, last_use(x, i));
    const int at = from + below(std::max(1, i - from));
    for (int tries = 0; tries < kTries; ++tries) {
      int x = 0, q = pick(x);
      if (q <= at || q == i) continue;
      const int u = g_.maker[x], last = last_use(x, q);
      if (u == v || last >= at || q - last < 2 || !may_pay(u, last, q, room + g_.cost[v])) continue;
      done_.clear();
      const double worse = make({Kind::drop, v, i, -1});
      return settle(worse + grow(x, q - (i < q)), room);
    }
  }
  static constexpr int kTries = 8;

  // Pick a run that may be dropped: a later run of a node, or its first run if no reader comes before the second
  // one. Returns its position, or 0.
  int pick_drop(int& v) {
    if (again_.empty()) return 0;
    v = again_[below(static_cast<int>(again_.size()))];
    const Runs mine = runs(v);
    const int k = below(static_cast<int>(mine.size())), i = mine[k];
    if (i == length() - 1) return 0;  // the last node never moves, even if it runs again before
    if (k == 0)  // readers before the second run need the first one
      for (int x : g_.makes[v])
        for (int w : g_.readers[x])
          if (first_[w] < mine[1]) return 0;
    return i;
  }

  // Recompute a value right before its reader, and recursively some inputs of this recomputation. Added one
  // by one, such runs would not improve the schedule: each alone keeps the values that it reads alive.
  // Applies the edits, adds them to `done_`, and returns by how much they worsen the schedule.
  double grow(int x, int q) {
    chain_.clear();
    chain_.push_back(g_.maker[x]);
    double worse = 0;
    for (std::size_t k = 0; k < chain_.size(); ++k) {  // each run comes right before its reader, so always at q
      const int v = chain_[k];
      for (int y : g_.reads[v])
        if (first_[g_.maker[y]] >= q) return std::numeric_limits<double>::infinity();
      worse += make({Kind::add, v, -1, q});
      for (int y : g_.reads[v]) {
        const int u = g_.maker[y];
        if (g_.size[y] == 0 || g_.once[u] || q - last_use(y, q) < 3 || chain_.size() >= kChain || (next() & 1) == 0) continue;
        if (std::find(chain_.begin(), chain_.end(), u) == chain_.end()) chain_.push_back(u);
      }
    }
    return worse;
  }
  static constexpr std::size_t kChain = 12;

  // Apply an edit that adds or drops a run, whatever it costs. Returns by how much it worsens the schedule.
  double make(const Edit& e) {
    const double cost = e.kind == Kind::add ? g_.cost[e.node] : -g_.cost[e.node];
    const double worse = cost + price_ * judge(e);
    apply(e);
    done_.push_back(e);
    return worse;
  }

  // Keep the edits in `done_` if they worsen the schedule by at most `room`; otherwise undo them.
  void settle(double worse, double room) {
    if (worse <= room) {
      for (const Edit& e : done_) e.kind == Kind::add ? again_.push_back(e.node) : forget(e.node);
      return;
    }
    for (; !done_.empty(); done_.pop_back()) {
      const Edit& e = done_.back();
      const Edit back = e.kind == Kind::add ? Edit{Kind::drop, e.node, e.j, -1} : Edit{Kind::add, e.node, -1, e.i};
      judge(back);
      apply(back);
    }
  }

  void forget(int v) {  // remove one entry of v from `again_`
    *std::find(again_.begin(), again_.end(), v) = again_.back();
    again_.pop_back();
  }

  inline static const std::vector<int> kNone;

  const ScheduleGraph& g_;
  double capacity_;
  std::uint64_t random_ = 0;
  double least_ = 0, mean_cost_ = 1, mean_bytes_ = 1;
  double price_ = 1, floor_ = 0, scale_ = 1;
  std::vector<double> own_;  // bytes of a run's results and its extra bytes, by node
  std::vector<int> sequence_;
  std::vector<int> count_, first_, last_;  // by node: number of runs, and positions of the first and last run
  std::vector<std::vector<int>> runs_;     // ascending positions of the runs, for nodes that run several times
  std::vector<double> gap_, load_, excess_;  // load_: bytes alive during the run at each position
  static constexpr int kBlock = 64;
  std::vector<double> most_;  // largest load, by block of `kBlock` positions
  std::vector<char> over_at_;
  std::vector<int> again_;  // each node once for every run beyond its first
  double cost_ = 0;
  int over_ = 0;  // number of positions over the capacity
  Result best_;
  std::vector<Span> before_, after_;
  std::vector<std::pair<int, double>> steps_;
  std::vector<int> chain_;
  std::vector<Edit> done_;  // edits that were applied and may be undone, see `settle`
  int low_ = 0, high_ = 0, own_last_ = 0;
};

}  // namespace remat
