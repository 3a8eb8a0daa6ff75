/* A team of threads that works through phases of small tasks.
 *
 * Helpers are optional: a phase ends when its tasks are done, not when threads arrive. A helper that the system has put
 * to sleep holds nothing up unless it is in the middle of a task, and catches up by itself; on a machine that others
 * use too, a barrier would wait out a whole time slice. */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#include <stdint.h>

#define MAX_CONTEXT_BYTES 512

typedef struct Team Team;

/* One thread's place in a job. */
typedef struct {
    Team *team;
    uint32_t epoch;
    int thread;
    int phase;
} Worker;

typedef void (*Task)(const void *context, int task, int thread);

/* Goes through a job's phases with run_phase, every thread in the same order, and returns at once when that returns 0:
 * the job is over and this thread late. Outside of tasks it may read the context itself, of which each thread has a
 * copy, but nothing that it points to: only a task is sure that the caller still waits. */
typedef void (*Job)(const void *context, Worker *worker);

/* A team for jobs of at most max_phases phases; the calling thread of each job counts as one. NULL: out of memory. */
Team *outrider_team_create(int num_threads, int max_phases);
/* Ends the helpers. No job may be running. */
void outrider_team_destroy(Team *team);

/* Runs a job with all threads. One at a time; context_bytes is at most MAX_CONTEXT_BYTES. */
void run_job(Team *team, Job job, const void *context, int context_bytes);

/* Does tasks 0..num_tasks-1 of the next phase together with the others; returns 1 when all are done. */
int run_phase(Worker *worker, Task task, const void *context, int num_tasks);

#endif
