package shared

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"reflect"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// leftFile is a file or an object that hosts have left.
type leftFile struct {
	name string
	id   uint64
	size int64
	data []byte
}

// left reads testdata: the model's files as hosts at version 0fa74b0f had them when all were killed. A name that ends in / is a directory.
// Among them are a batch that is proposed and one that is decided, a member that is gone with a published temporary, a log that has an
// end, and an object in no log.
func left(t *testing.T, medium string) (list []leftFile) {
	b, err := os.ReadFile("testdata/left." + medium)
	testenv.OK(t, err)
	for line := range strings.Lines(string(b)) {
		var f leftFile
		var text string
		fmt.Sscan(line, &f.name, &f.id, &f.size, &text)
		f.data, _ = base64.StdEncoding.DecodeString(text)
		root := map[string]string{"directory": "/r/" + Dir, "bucket": Dir}[medium]
		f.name = strings.Replace(f.name, "~", root, 1)
		list = append(list, f)
	}
	return list
}

// TestLeftByAnEarlierVersion: hosts continue from what hosts of the version before this protocol had one code for both media left.
func TestLeftByAnEarlierVersion(t *testing.T) {
	for _, c := range media {
		t.Run(c.name, func(t *testing.T) {
			m := c.make(1, false)
			list := left(t, c.name)
			switch w := m.place.(type) {
			case *world:
				inodes := map[uint64]*inode{}
				for _, f := range list {
					if strings.HasSuffix(f.name, "/") {
						w.dirs[path.Clean(f.name)] = true
						continue
					}
					w.inos = max(w.inos, f.id)
					if inodes[f.id] == nil {
						inodes[f.id] = &inode{ino: f.id, size: f.size, data: f.data}
					}
					inodes[f.id].links++
					w.files[f.name] = inodes[f.id]
				}
			case *objects:
				for _, f := range list {
					w.ids = max(w.ids, f.id)
					w.set(f.name, &object{data: f.data, bytes: f.size, id: f.id})
				}
			}
			for _, id := range []string{"b", "c", "d"} { // a stays away
				m.boot(id)
			}
			m.calm(t.Fatalf)
			for _, n := range m.nodes {
				if s := n.Stats(); s.Peers != 2 {
					t.Errorf("%s: %+v, want two others", n.name, s)
				}
				m.kill(n)
			}
		})
	}
}

// TestFormats: what an earlier version wrote is read and written again, with the same bytes where the order of the fields is the same.
func TestFormats(t *testing.T) {
	count := map[string]int{}
	for _, c := range media {
		for _, f := range left(t, c.name) {
			_, name, ours := strings.Cut(f.name, Dir+"/")
			if !ours || name == "" || strings.HasSuffix(name, "/") || strings.Contains(name, "/t/") {
				continue
			}
			kind := c.name + " " + strings.Trim(path.Base(name), ".0123456789")
			var v any
			switch first, _, _ := strings.Cut(name, "/"); {
			case strings.Contains(name, "/log.") || first == "log":
				kind = c.name + " log"
				head, err := decodeLogHead(f.data)
				testenv.OK(t, err)
				published, records, err := decodeLog(f.data)
				testenv.OK(t, err)
				if a := (attempt{records: records}); string(encodeLog(head, records)) != string(f.data) || head+a.published() != published {
					t.Errorf("%s: written again with other bytes", f.name)
				}
			case first == "batch":
				kind = c.name + " batch"
				victims, err := decodeVictims(f.data)
				testenv.OK(t, err)
				if string(encodeVictims(victims)) != string(f.data) || len(victims) == 0 {
					t.Errorf("%s: written again with other bytes", f.name)
				}
			case c.name == "bucket" && first == "hosts":
				kind, v = "bucket hosts", &objectStatus{}
			case name == "evictor":
				v = &evictor{}
			case strings.Contains(name, "/grants/"):
				kind, v = "directory grants", &grantFile{}
			case path.Base(name) == "status":
				v = &status{}
			case path.Base(name) == "beat":
				v = &beat{}
			case path.Base(name)[0] == 'j':
				v = &batchFile{}
			case path.Base(name)[0] == 'd':
				v = &decision{}
			}
			if count[kind]++; v == nil {
				continue
			}
			testenv.OK(t, DecodeControl(f.data, v))
			b, err := EncodeControl(v)
			testenv.OK(t, err)
			var was, is map[string]any
			testenv.OK(t, json.Unmarshal(f.data[controlHead:], &was))
			testenv.OK(t, json.Unmarshal(b[controlHead:], &is))
			if !reflect.DeepEqual(was, is) || kind != "bucket hosts" && string(b) != string(f.data) {
				t.Errorf("%s is %s, and written again %s", f.name, f.data, b)
			}
		}
	}
	if len(count) != 10 {
		t.Errorf("kinds of files: %v, want 10", count)
	}
}
