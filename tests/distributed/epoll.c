// Replaces epoll_wait in the test ranks: a thread that polls without pause sleeps between polls.
//
// gloo's thread polls so while a message has come that its rank does not yet receive
// (https://github.com/pytorch/gloo/issues/246). It takes a quarter of the processor time.

#include <sys/epoll.h>
#include <time.h>

#define POLLS 8          // in a row, before the first sleep
#define NO_PAUSE 10000   // ns between two polls of a row
#define SLEEP 50000      // ns

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout) {
    static _Thread_local long last = 0;
    static _Thread_local int polls = 0;
    long now = nanoseconds();
    polls = now - last < NO_PAUSE ? polls + 1 : 0;
    if (polls > POLLS) {
        struct timespec sleep = {0, SLEEP};
        nanosleep(&sleep, NULL);
        now = nanoseconds();
    }
    last = now;
    return epoll_pwait(epfd, events, maxevents, timeout, NULL);
}
