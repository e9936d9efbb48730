// End searches on Ctrl-C. The searches do not depend on Python. They call `listen` regularly, and module.cpp
// sets `heed`, which `listen` calls to check for an interrupt.
#pragma once

#include <chrono>

namespace remat {

// Checks for an interrupt, and throws to end the search. Set in the thread that imported the module; null in
// all other threads.
inline thread_local void (*heed)() = nullptr;

// Call `heed`, at most twenty times a second.
inline void listen() {
  thread_local std::chrono::steady_clock::time_point next{};
  if (heed == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next) return;
  next = now + std::chrono::milliseconds(50);
  heed();
}

}  // namespace remat
