package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// monitoring is the directory of the rules and the dashboard.
const monitoring = "../monitoring/"

func promtool(t *testing.T, args ...string) (string, error) {
	t.Helper()
	testenv.Need(t, testenv.Promtool)
	out, err := exec.Command("promtool", args...).CombinedOutput()
	return string(out), err
}

var (
	alertInRules = regexp.MustCompile(`(?m)^ +- alert: (\w+)$`)
	testOfAlert  = regexp.MustCompile(`(?m)^  - name: (\w+), (fires|does not fire)$`)
)

// Every alert fires when it should and not when it should not, and no rule can be changed without a test that fails.
func TestAlerts(t *testing.T) {
	if out, err := promtool(t, "test", "rules", monitoring+"alerts_test.yml"); err != nil {
		t.Errorf("test the alerts: %v\n%s", err, out)
	}
	tested := map[string]bool{}
	for _, m := range testOfAlert.FindAllStringSubmatch(read(t, monitoring+"alerts_test.yml"), -1) {
		tested[m[1]+" "+m[2]] = true
	}
	alerts := alertInRules.FindAllStringSubmatch(read(t, monitoring+"alerts.yml"), -1)
	if len(alerts) < 15 {
		t.Errorf("only %d alerts were found", len(alerts))
	}
	for _, m := range alerts {
		if !tested[m[1]+" fires"] || !tested[m[1]+" does not fire"] {
			t.Errorf("%s is not tested both ways", m[1])
		}
	}
}

// Prometheus understands every query of the dashboard, no panel lacks one, and none lie on each other.
func TestDashboard(t *testing.T) {
	type place struct{ X, Y, W, H int }
	var dashboard struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			GridPos place
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct{ List []struct{ Name string } }
	}
	testenv.OK(t, json.Unmarshal([]byte(read(t, monitoring+"dashboard.json")), &dashboard))
	if len(dashboard.Panels) < 20 || len(dashboard.Templating.List) != 2 {
		t.Errorf("%d panels, %d variables", len(dashboard.Panels), len(dashboard.Templating.List))
	}
	rules := strings.Builder{}
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	taken := map[[2]int]string{}
	ids := map[int]bool{}
	for _, p := range dashboard.Panels {
		if ids[p.ID] || p.Title == "" || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("the panel %d %q", p.ID, p.Title)
		}
		ids[p.ID] = true
		for i, target := range p.Targets {
			expr := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*").Replace(target.Expr)
			if strings.Contains(expr, "$") || target.LegendFormat == "" {
				t.Errorf("%s: a variable that is not there, or no legend: %s", p.Title, target.Expr)
			}
			fmt.Fprintf(&rules, "  - record: panel_%d_%d\n    expr: %q\n", p.ID, i, expr)
		}
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := taken[at]; other != "" || at[0] >= 24 {
					t.Fatalf("%s lies on %q or beyond the right edge at %v", p.Title, other, at)
				}
				taken[at] = p.Title
			}
		}
	}
	file := filepath.Join(t.TempDir(), "rules.yml")
	testenv.OK(t, os.WriteFile(file, []byte(rules.String()), 0o600))
	if out, err := promtool(t, "check", "rules", file); err != nil {
		t.Errorf("check the alerts: %v\n%s", err, out)
	}
}
