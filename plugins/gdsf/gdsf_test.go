package gdsf

import (
	"testing"

	"github.com/kvhost/kvhost/plugins/internal/policytest"
)

// With entries of one size and cost, GDSF is LFU-DA.
func TestTextbook(t *testing.T) { policytest.Compare(t, policytest.Of(New), nil, policytest.LFU(true)) }

func TestContract(t *testing.T) { policytest.Abuse(t, policytest.Of(New), nil) }

func TestAllocatesNothing(t *testing.T) { policytest.AllocatesNothing(t, policytest.Of(New), nil) }
