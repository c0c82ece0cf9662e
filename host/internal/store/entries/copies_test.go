package entries

import "testing"

// TestCopies: readers hear of the first copy and of the last one, in whatever order copies come and go.
func TestCopies(t *testing.T) {
	c := NewCopies()
	want := func(what string, got, want bool) {
		t.Helper()
		if got != want {
			t.Errorf("%s: got %v, want %v", what, got, want)
		}
	}
	want("an entry that is not counted comes", c.add(1), true)
	want("it goes", c.remove(1), true)
	c.add(1)
	c.Watch(1)
	want("a second copy", c.add(1), false)
	c.Unwatch(1)
	want("the first copy goes", c.remove(1), false)
	want("the last one goes", c.remove(1), true)
	if len(c.of) != 0 {
		t.Errorf("%d entries are still counted", len(c.of))
	}
	c.add(2)
	c.Watch(2)
	want("the only copy goes while another is made", c.remove(2), true)
	want("the other is there", c.add(2), true)
	c.Unwatch(2)
	want("it goes, too", c.remove(2), true)
	if len(c.of) != 0 {
		t.Errorf("%d entries are still counted", len(c.of))
	}
}
