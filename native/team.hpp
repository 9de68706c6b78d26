// Threads that go through one piece of work together: all run the same function, share out its loops chunk by chunk, and
// meet at a barrier after each. Who arrives early spins for some microseconds, then sleeps: a neighbour on the same core
// must be able to run. Chunks are taken as threads come free, so a core that the host steals from does less, and nobody
// waits for it longer than for one chunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "wake_counter.hpp"

namespace dovetail {

class Team {
  public:
    class Member {
      public:
        Member(Team& team, int index) : index(index), team_(team) {}

        // Chunks 0..count-1, each by one member; all are done when it returns.
        template <class Body>
        void loop(int64_t count, Body&& body) {
            for (;;) {
                const int64_t chunk = team_.next_.fetch_add(1, std::memory_order_relaxed);
                if (chunk >= count) break;
                body(chunk);
            }
            team_.barrier();
        }

        // The same in another order: while members keep step, each goes through a stretch of its own, chunk after chunk, so
        // that what it reads is one stream.
        template <class Body>
        void loop_apart(int64_t count, Body&& body) {
            const int64_t members = size(), whole = count / members, rest = count % members;
            loop(count, [&](int64_t i) {
                const int64_t member = i % members;
                body(member * whole + std::min(member, rest) + i / members);
            });
        }

        int size() const { return team_.size(); }

        const int index;

      private:
        Team& team_;
    };

    using Work = std::function<void(Member&)>;

    static constexpr int kSpins = 4000;  // some tens of microseconds

    explicit Team(int size, int spins = kSpins);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // The one team of this size in the process, for as long as somebody holds it: models take turns, cores are shared.
    static std::shared_ptr<Team> shared(int size);

    // The caller is member 0. One piece of work at a time; further callers wait.
    void run(const Work& work);

    int size() const { return size_; }

  private:
    void barrier();
    void serve(int index);

    const int size_, spins_;  // spins: looks at a counter before a thread sleeps
    std::vector<int> cores_;  // one per member if the team has the process's cores to itself, else empty: not pinned
    std::mutex busy_;
    const Work* work_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) WakeCounter started_;     // pieces of work begun; members sleep on it
    alignas(64) WakeCounter generation_;  // barriers passed
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};  // chunk of the current loop
    std::vector<std::thread> threads_;
};

}  // namespace dovetail
