#include "team.hpp"

#include <map>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace dovetail {
namespace {

#if defined(__linux__)
std::vector<int> usable_cores() {
    cpu_set_t mask;
    std::vector<int> cores;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &mask)) cores.push_back(core);
    return cores;
}

// Holds the calling thread on one core, and gives it its cores back: threads that it starts later inherit its mask.
class Pinned {
  public:
    explicit Pinned(int core) {
        pthread_getaffinity_np(pthread_self(), sizeof before_, &before_);
        cpu_set_t mask;
        CPU_ZERO(&mask);
        CPU_SET(core, &mask);
        pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
    }
    ~Pinned() { pthread_setaffinity_np(pthread_self(), sizeof before_, &before_); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

  private:
    cpu_set_t before_;
};
#else
std::vector<int> usable_cores() { return {}; }
struct Pinned {
    explicit Pinned(int) {}
};
#endif

}  // namespace

Team::Team(int size, int spins) : size_(size < 1 ? 1 : size), spins_(spins) {
    // With fewer members than cores the others belong to somebody, perhaps to another team that would pick the same.
    std::vector<int> cores = usable_cores();
    if (size_ > 1 && static_cast<int>(cores.size()) == size_) cores_ = cores;
    for (int index = 1; index < size_; ++index) threads_.emplace_back(&Team::serve, this, index);
}

Team::~Team() {
    stopping_.store(true, std::memory_order_relaxed);  // seen by whoever sees the counter move
    started_.advance();
    for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<Team> Team::shared(int size) {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Team>> teams;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Team> team = teams[size].lock();
    if (!team) teams[size] = team = std::make_shared<Team>(size);
    return team;
}

void Team::run(const Work& work) {
    const std::lock_guard<std::mutex> lock(busy_);
    Member caller(*this, 0);
    if (size_ == 1) return work(caller);
    work_ = &work;
    started_.advance();
    if (cores_.empty()) {
        work(caller);
    } else {
        const Pinned pinned(cores_[0]);
        work(caller);
    }
    barrier();  // nobody holds `work` any longer
}

void Team::serve(int index) {
    if (!cores_.empty()) {
#if defined(__linux__)
        cpu_set_t mask;
        CPU_ZERO(&mask);
        CPU_SET(cores_[index], &mask);
        pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
#endif
    }
    Member member(*this, index);
    for (uint32_t seen = 0;; ++seen) {
        started_.wait(seen, spins_);
        if (stopping_.load(std::memory_order_relaxed)) return;
        (*work_)(member);
        barrier();
    }
}

void Team::barrier() {
    if (size_ == 1) {
        next_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint32_t seen = generation_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        generation_.advance();
    } else {
        generation_.wait(seen, spins_);
    }
}

}  // namespace dovetail
