// Faults: the rules, and the count of calls.

typedef struct { char name[48]; long nth, from, every, code, err, delay, shorter, flip, hang, answer; } rule;
typedef struct { char name[48]; long calls; } count;
static rule rules[64];
static int n_rules;
static count counts[160];
static int n_counts;
static long generation;
static int fault_log = -1; // where each rule that is hit is written, if anywhere
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void kvdouble_rules(const char* text) {
  pthread_mutex_lock(&lock);
  n_rules = n_counts = 0;
  generation++;
  char copy[4096], *save1, *save2;
  snprintf(copy, sizeof copy, "%s", text ? text : "");
  for (char* r = strtok_r(copy, ",", &save1); r && n_rules < 64; r = strtok_r(NULL, ",", &save1)) {
    rule* to = &rules[n_rules++];
    memset(to, 0, sizeof *to);
    to->shorter = to->flip = -1;
    char* part = strtok_r(r, ":", &save2);
    snprintf(to->name, sizeof to->name, "%s", part ? part : "");
    while ((part = strtok_r(NULL, ":", &save2))) {
      char* value = strchr(part, '=');
      long v = value ? atol(value + 1) : 1;
      if (!strncmp(part, "nth", 3)) to->nth = v;
      else if (!strncmp(part, "from", 4)) to->from = v;
      else if (!strncmp(part, "every", 5)) to->every = v;
      else if (!strncmp(part, "code", 4)) to->code = v;
      else if (!strncmp(part, "errno", 5)) to->err = v;
      else if (!strncmp(part, "delay", 5)) to->delay = v;
      else if (!strncmp(part, "short", 5)) to->shorter = v;
      else if (!strncmp(part, "flip", 4)) to->flip = v;
      else if (!strncmp(part, "hang", 4)) to->hang = 1;
      else if (!strncmp(part, "answer", 6)) to->answer = v;
    }
  }
  pthread_mutex_unlock(&lock);
}

static count* counted(const char* name) {
  for (int i = 0; i < n_counts; i++)
    if (!strcmp(counts[i].name, name)) return &counts[i];
  if (n_counts == 160) abort();
  count* c = &counts[n_counts++];
  snprintf(c->name, sizeof c->name, "%s", name);
  c->calls = 0;
  return c;
}

EXPORT long kvdouble_calls(const char* name) {
  pthread_mutex_lock(&lock);
  long n = counted(name)->calls;
  pthread_mutex_unlock(&lock);
  return n;
}

// fault counts a call, waits if it is to, and gives the rule that it falls under.
static rule fault(const char* name) {
  rule hit = {.shorter = -1, .flip = -1};
  pthread_mutex_lock(&lock);
  long call = ++counted(name)->calls, now = generation;
  for (int i = 0; i < n_rules; i++) {
    rule* r = &rules[i];
    if (strcmp(r->name, name) || (r->nth && r->nth != call) || (r->from && call < r->from) || (r->every && call % r->every)) continue;
    hit = *r;
    if (fault_log >= 0) dprintf(fault_log, "%s call %ld: code %ld errno %ld delay %ld short %ld flip %ld\n", name, call, r->code, r->err, r->delay, r->shorter, r->flip);
    break;
  }
  pthread_mutex_unlock(&lock);
  struct timespec nap = {hit.delay / 1000, hit.delay % 1000 * 1000000};
  if (hit.delay) nanosleep(&nap, NULL);
  while (hit.hang) {
    struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
    pthread_mutex_lock(&lock);
    hit.hang = generation == now;
    pthread_mutex_unlock(&lock);
  }
  return hit;
}
#define FAULT(name) do { rule r_ = fault(name); if (r_.code) return (int)r_.code; } while (0)
