/* Whether OpenMP's threads spin or sleep at barriers. */
#include <omp.h>
#include <pthread.h>
#include <semaphore.h>

#include "cpu/cpu.h"

namespace {

/* libgomp spins GOMP_SPINCOUNT times before a thread sleeps, but a hundred times at most while its threads outnumber the
 * cores. There is no call that changes either, so a second team, whose threads sleep for as long as it is there, makes them
 * outnumber the cores. */
class SecondTeam {
 public:
  SecondTeam() {
    sem_init(&ends_, 0, 0);
    runs_ = pthread_create(&thread_, nullptr, run, this) == 0;
  }
  ~SecondTeam() {
    sem_post(&ends_);
    if (runs_) pthread_join(thread_, nullptr);
    sem_destroy(&ends_);
  }

 private:
  static void* run(void* self) {
    int members = 0;
#pragma omp parallel num_threads(omp_get_num_procs() + 1) reduction(+ : members)
    members += 1;
    while (sem_wait(&static_cast<SecondTeam*>(self)->ends_)) {  // until it is no signal that ends the wait
    }
    return nullptr;
  }

  /* Of POSIX rather than of C++, whose symbols are newer than those that wheels may need. */
  sem_t ends_;
  pthread_t thread_;
  bool runs_;
};

pthread_mutex_t team_mutex = PTHREAD_MUTEX_INITIALIZER;
SecondTeam* team = nullptr;

}  // namespace

void nf4_cpu_sleep_at_barriers(int32_t sleeps) {
  pthread_mutex_lock(&team_mutex);
  if (sleeps && !team) {
    team = new SecondTeam;
  } else if (!sleeps && team) {
    delete team;
    team = nullptr;
  }
  pthread_mutex_unlock(&team_mutex);
}
