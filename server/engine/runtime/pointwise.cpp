// What a layer computes between its GEMMs and its attention on CPU, in float32: norms, rotary embedding, gated activation.
// pointwise.py mirrors the structs. Rows lie dense; a pitch is the floats from one row to the next.
#include <cmath>
#include <cstdint>

#include "attention/paged_cpu.h"

namespace {

// Rows of fewer floats in all are not worth waking a second thread for.
constexpr int64_t kWorthThreads = 1 << 15;

inline int threads_for(int64_t floats, int64_t threads) { return floats < kWorthThreads ? 1 : (int)threads; }

inline float root_of_mean(const float* x, int64_t width, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / (float)width + eps);
}

// e^x for any x; beyond the range of float the largest and the smallest number that are in it.
inline float exponential(float x) {
  const float capped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  return exp_in_range<float, int32_t>(capped);
}

}  // namespace

extern "C" {

struct Norm {
  float* x;  // [tokens, width]: where addend is given, x += addend first
  const float* addend;
  const float* weight;
  const float* residual;  // null: none
  float* out;             // residual + the norm of x
  int64_t tokens, width, x_pitch, threads;
  float eps, offset;
};

void pointwise_norm(const Norm* p) {
  const int64_t width = p->width;
#pragma omp parallel for num_threads(threads_for(p->tokens * width, p->threads)) if (p->tokens * width >= kWorthThreads)
  for (int64_t t = 0; t < p->tokens; ++t) {
    float* x = p->x + t * p->x_pitch;
    float* out = p->out + t * width;
    if (p->addend) {
      const float* addend = p->addend + t * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) x[i] += addend[i];
    }
    const float scale = root_of_mean(x, width, p->eps);
    const float offset = p->offset;
    const float* weight = p->weight;
    if (p->residual) {
      const float* residual = p->residual + t * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) out[i] = residual[i] + x[i] * scale * (weight[i] + offset);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) out[i] = x[i] * scale * (weight[i] + offset);
    }
  }
}

struct Rotation {
  float* heads;  // [tokens, count, dim], in place
  const float* norm;  // [dim]; null: none
  const float* cos;   // [tokens, columns]
  const float* sin;
  int64_t tokens, count, dim, columns, token_pitch, head_pitch, threads;
  float eps, offset;
};

void pointwise_rotate(const Rotation* p) {
  const int64_t half = p->columns / 2, floats = p->tokens * p->count * p->dim;
#pragma omp parallel for num_threads(threads_for(floats, p->threads)) if (floats >= kWorthThreads)
  for (int64_t t = 0; t < p->tokens; ++t) {
    const float* cos = p->cos + t * p->columns;
    const float* sin = p->sin + t * p->columns;
    for (int64_t h = 0; h < p->count; ++h) {
      float* x = p->heads + t * p->token_pitch + h * p->head_pitch;
      if (p->norm) {
        const float scale = root_of_mean(x, p->dim, p->eps);
#pragma omp simd
        for (int64_t i = 0; i < p->dim; ++i) x[i] *= scale * (p->norm[i] + p->offset);
      }
      float* y = x + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = y[i];
        x[i] = first * cos[i] - second * sin[i];
        y[i] = second * cos[half + i] + first * sin[half + i];
      }
    }
  }
}

struct Gate {
  const float* gate_up;  // [tokens, 2 columns]
  float* out;            // [tokens, columns]
  int64_t tokens, columns, threads;
  int64_t activation;  // 0: silu, 1: gelu by tanh
};

void pointwise_gate(const Gate* p) {
  const int64_t columns = p->columns, floats = p->tokens * columns;
#pragma omp parallel for num_threads(threads_for(floats, p->threads)) if (floats >= kWorthThreads)
  for (int64_t t = 0; t < p->tokens; ++t) {
    const float* gate = p->gate_up + t * 2 * columns;
    const float* up = gate + columns;
    float* out = p->out + t * columns;
    if (p->activation == 0) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        const float x = gate[i], bent = 1.5957691216f * (x + 0.044715f * x * x * x);
        out[i] = x / (1.0f + exponential(-bent)) * up[i];
      }
    }
  }
}

struct Angles {
  const int64_t* positions;  // [tokens]
  const float* frequencies;  // [half]
  float* cos;                // [tokens, 2 half]
  float* sin;
  int64_t tokens, half;
  float scaling;
};

void pointwise_angles(const Angles* p) {
  for (int64_t t = 0; t < p->tokens; ++t) {
    float* cos = p->cos + t * 2 * p->half;
    float* sin = p->sin + t * 2 * p->half;
    for (int64_t i = 0; i < p->half; ++i) {
      const float angle = (float)p->positions[t] * p->frequencies[i];
      cos[i] = cos[p->half + i] = std::cos(angle) * p->scaling;
      sin[i] = sin[p->half + i] = std::sin(angle) * p->scaling;
    }
  }
}

struct Call {
  void (*function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
  int64_t arguments[7];
};

// Calls of C functions with up to seven pointers and integers; functions that take fewer ignore the others.
void pointwise_run(const Call* calls, int64_t count) {
  for (const Call* c = calls; c != calls + count; ++c) {
    const int64_t* a = c->arguments;
    c->function(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
  }
}

}  // extern "C"
