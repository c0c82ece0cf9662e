package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

var (
	siteIDs   = regexp.MustCompile(`(?:id|name)="([^"]+)"`)
	siteLinks = regexp.MustCompile(`(?:href|src)="([^"#]*)(?:#([^"]*))?"`)
)

// Every link of the manual leads to a page of it and to a heading there, or to the repository; pages load nothing from elsewhere; what
// is found is where it is said to be; all documents of host/docs are pages.
func TestSite(t *testing.T) {
	t.Chdir(testenv.Root())
	dir := t.TempDir()
	testenv.OK(t, (&release{version: "1.2.3"}).site(dir))
	pages, ids := map[string]string{}, map[string]map[string]bool{}
	entries, err := os.ReadDir(dir)
	testenv.OK(t, err)
	for _, e := range entries {
		text := read(t, filepath.Join(dir, e.Name()))
		pages[e.Name()], ids[e.Name()] = text, map[string]bool{"": true}
		for _, m := range siteIDs.FindAllStringSubmatch(text, -1) {
			ids[e.Name()][m[1]] = true
		}
	}
	within := 0
	for name, text := range pages {
		if !strings.HasSuffix(name, ".html") {
			continue
		}
		for _, m := range siteLinks.FindAllStringSubmatch(text, -1) {
			file, at := m[1], m[2]
			if strings.Contains(file, ":") {
				path, repository := strings.CutPrefix(file, "https://github.com/kvhost/kvhost/blob/main/")
				if _, err := os.Stat(path); repository && err != nil || strings.Contains(m[0], "src=") {
					t.Errorf("%s leads to what is not there: %s", name, m[0])
				}
				continue
			}
			if file == "" {
				file = name
			}
			if within++; !ids[file][at] {
				t.Errorf("%s leads to %s#%s, which is not there", name, file, at)
			}
		}
		if strings.Contains(text, "<style") || strings.Contains(text, " style=") || strings.Contains(text, "<script>") {
			t.Errorf("%s has what the host's content policy refuses", name)
		}
	}
	if within < 500 {
		t.Errorf("%d links within the manual", within)
	}
	var found []siteSection
	text := strings.TrimSuffix(strings.TrimPrefix(pages["sections.js"], "const sections = "), ";\n")
	testenv.OK(t, json.Unmarshal([]byte(text), &found))
	for _, s := range found {
		if !ids[s.File][s.ID] || s.Title == "" {
			t.Errorf("a search finds %s#%s, %q", s.File, s.ID, s.Title)
		}
	}
	docs, err := filepath.Glob("host/docs/*.md")
	testenv.OK(t, err)
	for _, path := range docs {
		if pages[strings.TrimSuffix(filepath.Base(path), ".md")+".html"] == "" {
			t.Errorf("%s is no page of the manual", path)
		}
	}
}
