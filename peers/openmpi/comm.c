/* Times MPI's all-to-all and all-reduce between processes, as crates/comm/benches/collectives.rs times ours.
 *
 *   mpicc -O3 comm.c -o comm && mpirun -n 2 ./comm [REPETITIONS]
 *
 * Bytes are what each rank holds, its whole send buffer. Each repetition follows a barrier; its time is the slowest
 * rank's. Where MPI offers two ways to do the same (counts or none, in place or not), the faster is printed.
 * busbw multiplies bytes / time by (n-1)/n for all-to-all and by 2(n-1)/n for all-reduce. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM_UP = 5, MOST = 2001 };

typedef struct {
  int ranks, *counts, *places;
  long floats;
  float *send, *receive;
} Buffers;

static void alltoall(Buffers *b) {
  MPI_Alltoall(b->send, b->counts[0], MPI_FLOAT, b->receive, b->counts[0], MPI_FLOAT, MPI_COMM_WORLD);
}

static void alltoallv(Buffers *b) {
  MPI_Alltoallv(b->send, b->counts, b->places, MPI_FLOAT, b->receive, b->counts, b->places, MPI_FLOAT, MPI_COMM_WORLD);
}

static void allreduce(Buffers *b) {
  MPI_Allreduce(b->send, b->receive, (int)b->floats, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void allreduce_in_place(Buffers *b) {
  MPI_Allreduce(MPI_IN_PLACE, b->receive, (int)b->floats, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void barrier(Buffers *b) {
  (void)b;
  MPI_Barrier(MPI_COMM_WORLD);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Median seconds; the least goes to *least. */
static double median(void (*operation)(Buffers *), Buffers *b, int repetitions, double *least) {
  static double times[MOST];
  for (int i = -WARM_UP; i < repetitions; i++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    operation(b);
    double own = MPI_Wtime() - begun, slowest;
    MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (i >= 0) times[i] = slowest;
  }
  qsort(times, repetitions, sizeof *times, ascending);
  *least = times[0];
  return times[repetitions / 2];
}

static void fill(float *values, long n, float value) {
  for (long i = 0; i < n; i++) values[i] = value;
}

/* Ends everything if MPI computed something else than our benchmark would. */
static void check(Buffers *b, int rank) {
  fill(b->send, b->floats, (float)(rank + 1));
  allreduce(b);
  int wrong = b->receive[0] != (float)(b->ranks * (b->ranks + 1) / 2);
  alltoall(b);
  for (int from = 0; from < b->ranks; from++) wrong |= b->receive[b->places[from]] != (float)(from + 1);
  if (wrong) {
    fprintf(stderr, "rank %d received wrong values\n", rank);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

typedef struct {
  const char *name, *ways[2];
  void (*run[2])(Buffers *);
  double factor;
} Workload;

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int ranks, rank, length;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  MPI_Get_library_version(version, &length);
  version[strcspn(version, ",\n\"")] = 0;

  const Workload workloads[] = {
      {"barrier", {"barrier", NULL}, {barrier, NULL}, 0.0},
      {"all_to_all", {"alltoall", "alltoallv"}, {alltoall, alltoallv}, 1.0},
      {"all_reduce_f32", {"out of place", "in place"}, {allreduce, allreduce_in_place}, 2.0},
  };
  const long kib[] = {0, 64, 1024, 16 * 1024};
  for (int s = 0; s < 4; s++) {
    Buffers b = {.ranks = ranks, .floats = kib[s] * 256};
    b.send = malloc(b.floats * sizeof(float) + 64), b.receive = malloc(b.floats * sizeof(float) + 64);
    b.counts = malloc(ranks * sizeof(int)), b.places = malloc(ranks * sizeof(int));
    for (int i = 0; i < ranks; i++) b.counts[i] = (int)(b.floats / ranks), b.places[i] = i * b.counts[i];
    if (s > 0) check(&b, rank);
    fill(b.send, b.floats, 1), fill(b.receive, b.floats, 0);
    for (int w = s > 0; w < (s > 0 ? 3 : 1); w++) {
      const Workload *it = &workloads[w];
      int repetitions = argc > 1 ? atoi(argv[1]) : s == 0 ? 2001 : kib[s] > 4096 ? 31 : 201;
      if (repetitions < 1 || repetitions > MOST) MPI_Abort(MPI_COMM_WORLD, 2);
      double best = 1e9, least = 0;
      int way = 0;
      for (int i = 0; i < 2 && it->run[i]; i++) {
        double of_way, seconds = median(it->run[i], &b, repetitions, &of_way);
        if (seconds < best) best = seconds, least = of_way, way = i;
      }
      double algbw = kib[s] * 1024 / best / 1e9, busbw = algbw * it->factor * (ranks - 1) / ranks;
      if (rank == 0)
        printf("{\"system\": \"%s\", \"workload\": \"%s n%d %ld KiB\", \"us\": %.3f, \"algbw_GBps\": %.3f, "
               "\"busbw_GBps\": %.3f, \"peak_rss_mb\": null, \"notes\": \"median of %d, slowest rank; fastest %.3f us; "
               "%s\"}\n",
               version, it->name, ranks, kib[s], best * 1e6, algbw, busbw, repetitions, least * 1e6, it->ways[way]);
      fflush(stdout);
    }
    free(b.send), free(b.receive), free(b.counts), free(b.places);
  }
  MPI_Finalize();
  return 0;
}
