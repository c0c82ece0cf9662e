package observe

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server"
)

var screenshots = flag.String("screenshots", "", "directory for pictures of the page")

// browser is a Chromium that is driven by WebDriver (https://www.w3.org/TR/webdriver2/).
type browser struct {
	t       *testing.T
	session string // URL
}

var driverPort = regexp.MustCompile(`started successfully on port (\d+)`)

// startDriver starts a chromedriver, which ends with the test. It leaves b without a session where that did not start, and says its output.
func (b *browser) startDriver(dir string) (said []string) {
	cmd := exec.Command("chromedriver", "--port=0")
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	out, err := cmd.StdoutPipe()
	testenv.OK(b.t, err)
	testenv.OK(b.t, cmd.Start())
	b.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if m := driverPort.FindStringSubmatch(lines.Text()); m != nil {
			b.session = "http://127.0.0.1:" + m[1] + "/session"
			return nil
		}
		said = append(said, lines.Text())
	}
	return said
}

// openBrowser starts Chromium with a window of this size. It ends with the test.
func openBrowser(t *testing.T, width, height int, scheme string) *browser {
	t.Helper()
	testenv.Need(t, testenv.Chromium)
	dir := testenv.Dir(t) // it makes sockets, also in TMPDIR
	b := &browser{t: t}
	for tries := 1; b.session == ""; tries++ { // it ends where another has taken the port that it chose
		said := b.startDriver(dir)
		if b.session == "" && tries == 5 {
			t.Fatalf("chromedriver did not start: %q", said)
		}
	}
	made := b.ask("POST", "", map[string]any{"capabilities": map[string]any{"alwaysMatch": map[string]any{
		"goog:loggingPrefs": map[string]string{"browser": "ALL"},
		"goog:chromeOptions": map[string]any{"args": []string{"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
			"--hide-scrollbars", "--user-data-dir=" + dir}},
	}}})
	b.session += "/" + made.(map[string]any)["sessionId"].(string)
	t.Cleanup(func() { b.ask("DELETE", "", nil) })
	b.devtools("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})
	b.devtools("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}})
	return b
}

// ask makes a WebDriver call and returns its value.
func (b *browser) ask(method, path string, body any) any {
	b.t.Helper()
	var payload bytes.Buffer
	if body != nil {
		testenv.OK(b.t, json.NewEncoder(&payload).Encode(body))
	}
	q, err := http.NewRequest(method, b.session+path, &payload)
	testenv.OK(b.t, err)
	r, err := http.DefaultClient.Do(q)
	testenv.OK(b.t, err)
	defer r.Body.Close()
	var answer struct{ Value any }
	testenv.OK(b.t, json.NewDecoder(r.Body).Decode(&answer))
	if r.StatusCode != http.StatusOK {
		b.t.Fatalf("%s %s: the browser answers %v", method, path, answer.Value)
	}
	return answer.Value
}

func (b *browser) devtools(command string, params any) {
	b.t.Helper()
	b.ask("POST", "/goog/cdp/execute", map[string]any{"cmd": command, "params": params})
}

func (b *browser) open(url string) { b.ask("POST", "/url", map[string]any{"url": url}) }

// eval runs a script in the page and returns its value.
func (b *browser) eval(script string) any {
	b.t.Helper()
	return b.ask("POST", "/execute/sync", map[string]any{"script": script, "args": []any{}})
}

// wait runs a script until it is true. The test's own time limit ends a wait that never is.
func (b *browser) wait(script string) {
	b.t.Helper()
	b.ask("POST", "/timeouts", map[string]any{"script": 60000})
	b.ask("POST", "/execute/async", map[string]any{"args": []any{}, "script": `const done = arguments[0];
		const look = () => { if (` + script + `) done(true); else setTimeout(look, 20); }; look();`})
}

// picture writes a screenshot of the whole page when pictures were asked for.
func (b *browser) picture(name string) {
	b.t.Helper()
	if *screenshots == "" {
		return
	}
	got := b.ask("POST", "/goog/cdp/execute", map[string]any{"cmd": "Page.captureScreenshot", "params": map[string]any{"captureBeyondViewport": true}})
	png, err := base64.StdEncoding.DecodeString(got.(map[string]any)["data"].(string))
	testenv.OK(b.t, err)
	testenv.OK(b.t, os.WriteFile(filepath.Join(*screenshots, name+".png"), png, 0o600))
}

// complaints are what the browser's console has of errors, refused content among them.
func (b *browser) complaints() (list []string) {
	for _, e := range b.ask("POST", "/se/log", map[string]any{"type": "browser"}).([]any) {
		entry := e.(map[string]any)
		if text := entry["message"].(string); entry["level"] == "SEVERE" && !strings.Contains(text, "401") {
			list = append(list, text)
		}
	}
	return list
}

// status is a host's status with something of everything in it. Its figures grow with each call.
func status(n uint64) *proto.StatusResponse {
	load := make([]uint64, 21)
	load[10], load[12] = 5*n, n
	var bounds []*durationpb.Duration
	for _, seconds := range server.LatencyBounds {
		bounds = append(bounds, durationpb.New(time.Duration(seconds*1e9)))
	}
	return &proto.StatusResponse{
		Version: "v1.2.3", Uptime: durationpb.New(time.Duration(n) * time.Second), Sessions: 2, Engines: 1, Serving: true,
		NotReady: []string{"root /mnt/nvme1/kv is out of service: input/output error"},
		Counters: map[string]uint64{"lookups": 9 * n, "lookup_keys": 100 * n, "lookup_hits": 75 * n,
			"level0_hits": 51 * n, "level0_loaded_bytes": 3 << 30, "level0_volatile": 50, "level0_kept": 35, "level1_hits": 24 * n, "level1_loaded_bytes": 5 << 30,
			"level1_demotion": 4321, "level1_demotion_shed": 11, "level0_prefetch": 8, "level0_prefetch_used": 2},
		Roots: []*proto.RootStatus{
			{Path: "/mnt/nvme0/kv", Capacity: 2 << 40, Used: 1 << 40, Entries: 123456, Evictions: n,
				State: proto.RootState_ROOT_STATE_IN_SERVICE},
			{Path: "/mnt/nvme1/kv", Capacity: 2 << 40, State: proto.RootState_ROOT_STATE_OUT, Reason: "<b>input/output error</b>", Outages: 1},
		},
		Policies: []*proto.PolicyStatus{
			{Name: "main", Role: proto.PolicyRole_POLICY_ROLE_EVICT, State: proto.PolicyState_POLICY_STATE_ACTING, Module: "prefix.wasm",
				Calls: n, Records: 100 * n, Time: durationpb.New(time.Duration(n) * 10 * time.Microsecond), Fuel: 7000 * n},
			{Name: "next", Role: proto.PolicyRole_POLICY_ROLE_EVICT, Module: "lru.wasm", State: proto.PolicyState_POLICY_STATE_SHADOW,
				Trial: &proto.Trial{Keys: 100 * n, Hits: 60 * n, LiveHits: 75 * n}},
			{Name: "bad", Role: proto.PolicyRole_POLICY_ROLE_PLACE, Module: "x.wasm", State: proto.PolicyState_POLICY_STATE_QUARANTINE, Faults: 6, Reason: "trap: unreachable"},
		},
		Routes: []*proto.RouteStatus{{Gpu: "host", Root: "/mnt/nvme0/kv", Route: proto.Route_ROUTE_STAGED,
			Direction: proto.Direction_DIRECTION_LOAD, Bytes: n << 30, Files: n}},
		Latencies:   []*proto.LatencyStatus{{Answer: proto.Answer_ANSWER_LOAD, Count: 6 * n, Bounds: bounds, Buckets: load}},
		Usage:       []*proto.UsageStatus{{Model: "meta-llama/Llama-3.1-8B", Tenant: 7, Keys: 100 * n, Hits: 75 * n}},
		SessionList: []*proto.SessionStatus{{Number: 1, Engine: "vllm-0", Role: "worker", Model: "meta-llama/Llama-3.1-8B", Since: &timestamppb.Timestamp{Seconds: 1.7e9}}},
	}
}

// TestPage looks at the page in a real browser: what it shows, that it fits its window, and that nothing is refused.
func TestPage(t *testing.T) {
	const token = "0123456789abcdef"
	var readings atomic.Uint64
	s := serve(t, Config{Status: func() *proto.StatusResponse { return status(readings.Add(1)) }, TokenFile: write(t, token),
		sampleEvery: 20 * time.Millisecond, period: time.Millisecond})
	testenv.Until(t, "40 readings of the host before the page is opened", func() bool { return readings.Load() >= 40 })
	for _, c := range []struct {
		width  int
		scheme string
	}{{1280, "light"}, {400, "dark"}} {
		t.Run(fmt.Sprintf("%d %s", c.width, c.scheme), func(t *testing.T) {
			b := openBrowser(t, c.width, 900, c.scheme)
			b.open("http://" + s.Addr() + "/")
			b.wait(`!document.getElementById('login').hidden`)
			b.eval(`document.getElementById('token').value = '` + token + `'; document.querySelector('form').requestSubmit()`)
			b.wait(`document.querySelectorAll('#roots tr').length > 2 && !document.querySelector('#throughput-key').textContent.includes('–')`)
			text := b.eval(`return document.body.innerText`).(string)
			for _, want := range []string{"v1.2.3", "not ready", "root /mnt/nvme1/kv is out of service", "75.0 %", "/mnt/nvme0/kv", "1 TiB",
				"<b>input/output error</b>", "shadow next", "60.0 %", "quarantine", "trap: unreachable", "Llama-3.1-8B", "vllm-0", "p99 ≤ 100 ms", "5 min ago", "2½ min ago", "manual"} {
				if !strings.Contains(text, want) {
					t.Errorf("the page lacks %q:\n%s", want, text)
				}
			}
			if drawn := b.eval(`return history.length`).(float64); drawn < 30 {
				t.Errorf("the charts begin with %v readings, want those that the host had before", drawn)
			}
			if path := b.eval(`return document.querySelector('#throughput path').getAttribute('d')`).(string); strings.Count(path, "L") < 20 {
				t.Errorf("the line of loads is %q, want the host's readings", path)
			}
			row := `return [...document.querySelectorAll('#levels tr')].map(r => [...r.cells].map(c => c.innerText).join('|'))`
			levels := fmt.Sprint(b.eval(row))
			for _, want := range []string{"level|hits|loaded|demoted to", "|3 GiB|", "|5 GiB|", "|8|2|70.0%|0", "|4321|0|0|0|-|11"} {
				if !strings.Contains(levels, want) {
					t.Errorf("the table of levels lacks %q: %s", want, levels)
				}
			}
			if !b.eval(`table({name: 'levels', columns: [], rows: []}); return document.getElementById('levels').closest('section').hidden`).(bool) {
				t.Error("levels are shown of a host that has one")
			}
			if wide := b.eval(`return document.documentElement.scrollWidth - window.innerWidth`).(float64); wide > 0 {
				t.Errorf("the page is %v pixels wider than its window", wide)
			}
			dark := b.eval(`const c = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number); return c[0] + c[1] + c[2] < 384`).(bool)
			if dark != (c.scheme == "dark") {
				t.Errorf("dark is %v in scheme %s", dark, c.scheme)
			}
			if list := b.complaints(); len(list) > 0 {
				t.Errorf("the console says %q", list)
			}
			b.picture(fmt.Sprintf("page-%d-%s", c.width, c.scheme))
			// The host's last reading may be of a moment before the page's first.
			b.eval(`const now = history.at(-1), at = (t, mib, keys) => ({...now, uptime: now.uptime - t,
				counters: {...now.counters, lookup_keys: keys, lookup_hits: keys}, routes: [{...now.routes[0], bytes: mib << 20}]});
				get = async name => name === 'status' ? at(0, 5, 8) : name === 'tables' ? [] : [at(4, 0, 4), at(2, 2, 8), at(.001, 4, 8)]; history = []; read()`)
			b.wait(`history.length > 1 && history.length < 5`)
			if key := b.eval(`return document.getElementById('throughput-key').innerText`).(string); !strings.Contains(key, "1.5 MiB/s") {
				t.Errorf("3 MiB in the last 2 s are drawn as %q, want 1.5 MiB/s", key)
			}
			if lone := b.eval(`const p = document.querySelector('#ratio path'); return p.getAttribute('d') + ' ' + getComputedStyle(p).strokeLinecap`); lone != "M596.0 5.0h0 round" {
				t.Errorf("a hit ratio between two gaps is drawn as %q, want a dot", lone)
			}
		})
	}
}

// TestManualPage reads the manual in a real browser: it fits its window, a search leads to a section of another page, and nothing is
// refused.
func TestManualPage(t *testing.T) {
	testenv.Need(t, testenv.Chromium)
	dir := t.TempDir()
	make := exec.Command("go", "run", "./examples/deploy", "-version", "1.2.3", "-manual", dir)
	make.Dir = testenv.Root()
	out, err := make.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s := serve(t, Config{manuals: []string{dir}})
	for _, c := range []struct {
		width  int
		scheme string
	}{{1280, "light"}, {400, "dark"}} {
		t.Run(fmt.Sprintf("%d %s", c.width, c.scheme), func(t *testing.T) {
			b := openBrowser(t, c.width, 900, c.scheme)
			for _, page := range []string{"", "operate.html", "reference.html", "figures.html", "spec.html"} {
				b.open("http://" + s.Addr() + "/manual/" + page)
				if wide := b.eval(`return document.documentElement.scrollWidth - window.innerWidth`).(float64); wide > 0 {
					t.Errorf("%s is %v pixels wider than its window", page, wide)
				}
				b.picture(fmt.Sprintf("manual-%s-%d-%s", page, c.width, c.scheme))
			}
			if listed := b.eval(`return document.getElementById('pages').open`).(bool); listed != (c.width > 760) {
				t.Errorf("the list of pages is open: %v", listed)
			}
			b.eval(`const f = document.getElementById('search'); f.value = 'rpm --oldpackage'; f.dispatchEvent(new Event('input'))`)
			b.wait(`document.querySelector('#found a')`)
			b.eval(`document.getElementById('search').form.requestSubmit()`)
			b.wait(`location.href.endsWith('/manual/releases.html#upgrade-and-downgrade')`)
			if list := b.complaints(); len(list) > 0 {
				t.Errorf("the console says %q", list)
			}
		})
	}
}
