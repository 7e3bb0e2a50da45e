/* Whether OpenMP's threads spin or sleep at barriers. */
#include <omp.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "cpu/cpu.h"

namespace {

/* libgomp spins GOMP_SPINCOUNT times before a thread sleeps, but a hundred times at most while its threads outnumber the
 * cores. There is no call that changes either, so a second team, whose threads sleep for as long as it is there, makes them
 * outnumber the cores. */
class SecondTeam {
 public:
  SecondTeam() : thread_([this] { run(); }) {}
  ~SecondTeam() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void run() {
    int members = 0;
#pragma omp parallel num_threads(omp_get_num_procs() + 1) reduction(+ : members)
    members += 1;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ends_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

std::mutex team_mutex;
SecondTeam* team = nullptr;

}  // namespace

void nf4_cpu_sleep_at_barriers(int32_t sleeps) {
  std::lock_guard<std::mutex> guard(team_mutex);
  if (sleeps && !team) {
    team = new SecondTeam;
  } else if (!sleeps && team) {
    delete team;
    team = nullptr;
  }
}
