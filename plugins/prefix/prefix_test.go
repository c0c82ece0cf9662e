package prefix

import (
	"testing"

	"github.com/kvhost/kvhost/plugins/internal/policytest"
)

func TestContract(t *testing.T) { policytest.Abuse(t, policytest.Of(New), nil) }

func TestAllocatesNothing(t *testing.T) { policytest.AllocatesNothing(t, policytest.Of(New), nil) }
