package lirs

import (
	"testing"

	"github.com/kvhost/kvhost/plugins/internal/policytest"
)

func TestTextbook(t *testing.T) { policytest.Compare(t, policytest.Of(New), nil, policytest.LIRS) }

func TestContract(t *testing.T) { policytest.Abuse(t, policytest.Of(New), nil) }

func TestAllocatesNothing(t *testing.T) { policytest.AllocatesNothing(t, policytest.Of(New), nil) }
