// Ends searches on Ctrl-C. Searches do not depend on Python: they call `listen` regularly, and the module
// defines its effect.
#pragma once

#include <chrono>

namespace remat {

// Throws to end the search. Set in the thread that receives signals, and null in other threads.
inline thread_local void (*heed)() = nullptr;

// Calls `heed`, twenty times a second at most.
inline void listen() {
  thread_local std::chrono::steady_clock::time_point next{};
  if (heed == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next) return;
  next = now + std::chrono::milliseconds(50);
  heed();
}

}  // namespace remat
