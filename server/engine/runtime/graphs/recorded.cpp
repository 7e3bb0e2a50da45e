// Recorded calls of C functions, one after another: what is left of a small step when its buffers stay where they are.
#include <cstdint>

extern "C" {

// recording.py mirrors it. Every argument is a pointer or an integer; functions that take fewer ignore the others.
struct Call {
  void* function;
  int64_t count;
  int64_t arguments[16];
};

void run_calls(const Call* calls, int64_t count) {
  using Small = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
  using Medium = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
  using Large = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
  for (const Call* c = calls; c != calls + count; ++c) {
    const int64_t* a = c->arguments;
    if (c->count <= 6) {
      reinterpret_cast<Small>(c->function)(a[0], a[1], a[2], a[3], a[4], a[5]);
    } else if (c->count <= 8) {
      reinterpret_cast<Medium>(c->function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    } else {
      reinterpret_cast<Large>(c->function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
                                           a[12], a[13], a[14], a[15]);
    }
  }
}

}  // extern "C"
