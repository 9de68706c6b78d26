// A counter that threads wait on until it moves: they spin for a while, then sleep in the kernel. Written out instead of
// std::atomic's wait and notify_all, which look for sleepers with a load that a processor may move before the store that
// the sleepers wait for (x86 does): a thread that is just going to sleep is then neither seen nor woken.
//
// Why no wake-up is lost. Four operations are sequentially consistent, so all threads agree on one order of them:
//
//     waiter   W1 sleepers += 1     W2 load value, sleep only if it is `seen`
//     advancer A1 value += 1        A2 load sleepers, wake all unless it is 0
//
// If A1 comes before W2, the waiter sees the new value and does not sleep. Otherwise W1, W2, A1, A2 is the order: A2 sees the
// waiter and wakes. Between W2 and falling asleep the kernel compares the value once more, under the lock that a wake-up
// takes: a wake-up that came too early was preceded by A1, so that comparison fails and the waiter returns.
//
// A waiter must be one step behind at most: nobody may advance twice while a thread waits for the first advance.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace dovetail {

inline void pause_processor() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` does nothing on server cores
#endif
}

class WakeCounter {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // What the caller wrote before is seen by every thread that returns from `wait`.
    void advance() {
        value_.fetch_add(1, std::memory_order_seq_cst);                        // A1
        if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_sleepers();  // A2
    }

    // Until the counter is no longer `seen`
    void wait(uint32_t seen, int spins) {
        for (int spin = 0; spin < spins; ++spin) {
            if (value() != seen) return;
            pause_processor();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);                            // W1
        while (value_.load(std::memory_order_seq_cst) == seen) sleep_while(seen);  // W2
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

    uint32_t sleepers() const { return sleepers_.load(std::memory_order_relaxed); }

  private:
#if defined(__linux__)
    static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is a word");

    void sleep_while(uint32_t seen) {  // may return early: the caller looks again
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    void wake_sleepers() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(uint32_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return value() != seen; });
    }
    void wake_sleepers() {
        { const std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper that has looked is waiting by now
        changed_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
#endif
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};  // threads between W1 and the end of their wait
};

}  // namespace dovetail
