package arc

import (
	"testing"

	"github.com/kvhost/kvhost/plugins/internal/policytest"
)

// The paper, but with REPLACE before the new entry is known.
func TestTextbook(t *testing.T) { policytest.Compare(t, policytest.Of(New), nil, policytest.ARC(true)) }

// The paper as it is: what asking early costs.
func TestNearThePaper(t *testing.T) {
	policytest.Near(t, policytest.Of(New), nil, 5, policytest.ARC(false))
}

func TestContract(t *testing.T) { policytest.Abuse(t, policytest.Of(New), nil) }

func TestAllocatesNothing(t *testing.T) { policytest.AllocatesNothing(t, policytest.Of(New), nil) }
