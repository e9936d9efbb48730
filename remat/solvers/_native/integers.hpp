// The integers that the kernel computes in.
#pragma once

#include <cstdint>

namespace remat {

using u32 = std::uint32_t;
using i64 = std::int64_t;
using i128 = __int128;

}  // namespace remat
