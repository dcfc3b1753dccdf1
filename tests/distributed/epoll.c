// Replaces epoll_wait in the test ranks: a thread that polls without a pause sleeps between polls.
//
// While a message waits for its receive, gloo's thread polls without a pause
// (https://github.com/pytorch/gloo/issues/246). These polls took a quarter of the processor time.

#include <sys/epoll.h>
#include <time.h>

#define POLLS_BEFORE_SLEEP 8
#define SHORTEST_PAUSE_NS 10000
#define SLEEP_NS 50000

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout) {
    static _Thread_local long last_poll = 0;
    static _Thread_local int polls_in_a_row = 0;
    long now = nanoseconds();
    if (now - last_poll < SHORTEST_PAUSE_NS)
        polls_in_a_row++;
    else
        polls_in_a_row = 0;
    if (polls_in_a_row > POLLS_BEFORE_SLEEP) {
        struct timespec pause = {0, SLEEP_NS};
        nanosleep(&pause, NULL);
        now = nanoseconds();
    }
    last_poll = now;
    return epoll_pwait(epfd, events, maxevents, timeout, NULL);
}
