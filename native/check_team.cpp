// The barrier of the thread pool alone: many rounds, more threads than cores, no spinning, so that threads fall asleep and
// are woken all the time. A watchdog ends the program with a message if no round passes for a while.
//
//     team_check [THREADS] [ROUNDS] [SPINS] [PATIENCE_S]
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "team.hpp"

using namespace dovetail;

namespace {

struct Plan {
    int threads;
    long rounds;
    int spins;
    int patience_s;  // without progress; generous, because a machine may have better to do
};

std::atomic<long> g_rounds_done{0};

[[noreturn]] void fail(const char* what, long round) {
    std::printf("team_check: %s in round %ld\n", what, round);
    std::fflush(stdout);
    std::_Exit(1);
}

void watch(int patience_s) {
    long seen = -1;
    for (int quiet_s = 0;; ++quiet_s) {
        const long now = g_rounds_done.load(std::memory_order_relaxed);
        if (now != seen) quiet_s = 0, seen = now;
        if (quiet_s >= patience_s) fail("no progress, a wake-up was lost", now);
        std::this_thread::sleep_for(std::chrono::seconds(1));
    }
}

// Plain memory: a barrier that lets somebody through too early is a data race, and found as a wrong number too.
struct Rounds {
    std::vector<long> reached;  // by each thread

    void pass(Team::Member& member, long round) {
        reached[member.index] = round;
        member.loop(0, [](int64_t) {});
        for (const long other : reached)
            if (other != round) fail("a thread passed the barrier early", round);
        member.loop(0, [](int64_t) {});
        if (member.index == 0) g_rounds_done.fetch_add(1, std::memory_order_relaxed);
    }
};

// Barriers within one piece of work, and pieces of work one after the other: both counters that threads sleep on
void check_barriers(const Plan& plan) {
    Team team(plan.threads, plan.spins);
    Rounds rounds{std::vector<long>(plan.threads)};
    team.run([&](Team::Member& member) {
        for (long round = 1; round <= plan.rounds; ++round) rounds.pass(member, round);
    });
    for (long round = plan.rounds + 1; round <= plan.rounds + plan.rounds / 4; ++round)
        team.run([&](Team::Member& member) { rounds.pass(member, round); });
}

// Every chunk once, in either order
void check_loops(const Plan& plan) {
    Team team(plan.threads, plan.spins);
    for (int64_t count = 0; count < 4 * plan.threads; ++count) {
        std::vector<std::atomic<int>> done(count), apart(count);
        team.run([&](Team::Member& member) {
            member.loop(count, [&](int64_t i) { done[i].fetch_add(1); });
            member.loop_apart(count, [&](int64_t i) { apart[i].fetch_add(1); });
        });
        for (int64_t i = 0; i < count; ++i)
            if (done[i] != 1 || apart[i] != 1) fail("a chunk was left out or done twice", count);
    }
}

// Teams that end while their threads are still on the way to sleep
void check_endings(const Plan& plan) {
    for (int i = 0; i < 200; ++i) {
        Team team(plan.threads, plan.spins);
        if (i % 2) team.run([](Team::Member& member) { member.loop(3, [](int64_t) {}); });
        g_rounds_done.fetch_add(1, std::memory_order_relaxed);
    }
}

long argument(int count, char** values, int index, long otherwise) {
    return index < count ? std::atol(values[index]) : otherwise;
}

}  // namespace

int main(int count, char** values) {
    const long cores = std::thread::hardware_concurrency();
    const Plan plan{static_cast<int>(argument(count, values, 1, 2 * cores)), argument(count, values, 2, 4'000'000),
                    static_cast<int>(argument(count, values, 3, 0)), static_cast<int>(argument(count, values, 4, 60))};
    std::thread(watch, plan.patience_s).detach();
    check_loops(plan);
    check_barriers(plan);
    check_endings(plan);
    std::printf("team_check: %d threads, %ld rounds, %d spins: ok\n", plan.threads, plan.rounds, plan.spins);
    std::fflush(stdout);
    std::_Exit(0);  // the watchdog is still there
}
