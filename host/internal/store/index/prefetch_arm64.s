//go:build !purego

#include "textflag.h"

// func prefetchLines(list *[PrefetchStep]unsafe.Pointer, span uintptr)
TEXT ·prefetchLines(SB), NOSPLIT, $0-16
	MOVD list+0(FP), R0
	MOVD span+8(FP), R2
	MOVD $8, R1

next:
	MOVD.P 8(R0), R3
	PRFM   (R3), PLDL1KEEP
	ADD    R2, R3
	PRFM   (R3), PLDL1KEEP
	SUBS   $1, R1
	BNE    next
	RET
