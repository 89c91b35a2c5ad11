// A coroutine on a stack of its own. On x86-64 the switch is a few instructions; elsewhere it is the C library's.
#pragma once
#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace remora_shim {

#if defined(__x86_64__)
// Saves the callee-saved registers on this stack, its top in *saved, and goes on where `target` was saved.
extern "C" void remora_switch_stack(void** saved, void* target);
asm(R"(
.text
.local remora_switch_stack
.type remora_switch_stack, @function
remora_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size remora_switch_stack, . - remora_switch_stack
)");
#endif

class Coroutine {
 public:
  // `body(call)` runs at the next enter().
  void start(void (*body)(void*), void* call, unsigned char* stack, size_t stack_bytes) {
    body_ = body;
    call_ = call;
    ended_ = false;
#if defined(__x86_64__)
    auto top = (reinterpret_cast<uintptr_t>(stack) + stack_bytes) & ~static_cast<uintptr_t>(15);
    void** frame = reinterpret_cast<void**>(top) - 1;  // the address main() would return to: never used
    *frame = nullptr;
    *--frame = reinterpret_cast<void*>(&Coroutine::main);
    for (int i = 0; i < 6; ++i) *--frame = nullptr;
    inside_ = frame;
#else
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack;
    inside_.uc_stack.ss_size = stack_bytes;
    inside_.uc_link = nullptr;
    makecontext(&inside_, &Coroutine::main, 0);
#endif
  }

  // Goes on until leave() or the end of the body; true at the end.
  bool enter() {
    entered_ = this;
#if defined(__x86_64__)
    remora_switch_stack(&outside_, inside_);
#else
    swapcontext(&outside_, &inside_);
#endif
    return ended_;
  }

  void leave() {
#if defined(__x86_64__)
    remora_switch_stack(&inside_, outside_);
#else
    swapcontext(&inside_, &outside_);
#endif
  }

 private:
  static void main() {
    Coroutine* self = entered_;
    self->body_(self->call_);
    self->ended_ = true;
    self->leave();
  }

  static inline Coroutine* entered_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* call_ = nullptr;
  bool ended_ = true;
#if defined(__x86_64__)
  void *inside_ = nullptr, *outside_ = nullptr;
#else
  ucontext_t inside_, outside_;
#endif
};

}  // namespace remora_shim
