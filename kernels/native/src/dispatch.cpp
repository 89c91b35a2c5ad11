#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "levels.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace remora {

#define REMORA_DECLARE(level)             \
  namespace level {                       \
  extern const LevelKernels level_kernels; \
  }
REMORA_DECLARE(portable)
REMORA_DECLARE(avx2)
REMORA_DECLARE(avx512)
REMORA_DECLARE(avx512bf16)
REMORA_DECLARE(amx)

namespace {

#if defined(__x86_64__) && !defined(REMORA_EMULATE)

// Linux gives the 8 KiB of tile state only to processes that ask for it; granted for all threads, now and later.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

bool cpu_has_amx() {
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25;
  constexpr unsigned ALL = AMX_BF16 | AMX_TILE | AMX_INT8;
  return (edx & ALL) == ALL;
}

// __builtin_cpu_supports also asks whether the operating system saves the registers.
bool cpu_has(Level level) {
  switch (level) {
    case Level::portable: return true;
    case Level::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Level::avx512:
      return cpu_has(Level::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vnni");
    case Level::avx512bf16: return cpu_has(Level::avx512) && __builtin_cpu_supports("avx512bf16");
    case Level::amx: {
      static const bool available = cpu_has(Level::avx512bf16) && cpu_has_amx() && may_use_tiles();
      return available;
    }
  }
  return false;
}

#else

// Emulated levels need no more than this machine has; other processor families have the portable level only.
bool cpu_has(Level) { return true; }

#endif

const LevelKernels* compiled(Level level) {
  switch (level) {
#if REMORA_HAS_PORTABLE
    case Level::portable: return &portable::level_kernels;
#endif
#if REMORA_HAS_AVX2
    case Level::avx2: return &avx2::level_kernels;
#endif
#if REMORA_HAS_AVX512
    case Level::avx512: return &avx512::level_kernels;
#endif
#if REMORA_HAS_AVX512BF16
    case Level::avx512bf16: return &avx512bf16::level_kernels;
#endif
#if REMORA_HAS_AMX
    case Level::amx: return &amx::level_kernels;
#endif
    default: return nullptr;
  }
}

}  // namespace

const char* level_name(Level level) {
  switch (level) {
    case Level::portable: return "portable";
    case Level::avx2: return "avx2";
    case Level::avx512: return "avx512";
    case Level::avx512bf16: return "avx512bf16";
    case Level::amx: return "amx";
  }
  return nullptr;
}

const LevelKernels* kernels_of(Level level) {
  const LevelKernels* kernels = compiled(level);
  return kernels != nullptr && cpu_has(level) ? kernels : nullptr;
}

const LevelKernels& default_kernels() {
  const char* wanted = std::getenv("REMORA_NATIVE_ISA");
  std::string available;
  for (int index = NUM_LEVELS - 1; index >= 0; --index) {
    const auto level = static_cast<Level>(index);
    const LevelKernels* kernels = kernels_of(level);
    if (kernels == nullptr) continue;
    if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, level_name(level)) == 0) return *kernels;
    available += std::string(available.empty() ? "" : ", ") + level_name(level);
  }
  throw std::invalid_argument("REMORA_NATIVE_ISA is " + std::string(wanted == nullptr ? "" : wanted) +
                              "; this machine has " + available);
}

}  // namespace remora
