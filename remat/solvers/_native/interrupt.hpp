// Whoever runs a search may want to end it, by Ctrl-C. Searches know nothing of Python: they call `listen`
// every now and then, and the module says what that does.
#pragma once

#include <chrono>

namespace remat {

// Throws where the search is to end. Set in the thread that hears signals, and null in others.
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
