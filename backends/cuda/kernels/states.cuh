// Layers that keep a state of a fixed size of each sequence: what a pass tells of its sequences.
// (backends/cuda/states/launch.py has the same structures and sizes.)
//
// A state lies in a place of the device's memory, with what all layers keep of a sequence; each layer's part
// begins a fixed number of bytes after the place does. A place that is read is never written in that pass.

#pragma once

#include "common.cuh"

// A sequence's tokens in the pass, and the place of the state before them; 0: nothing is known yet.
struct Part {
    int first, end;
    uint64 read;
};

// A layer's part of a place.
__device__ __forceinline__ float *part_of(uint64 place, int64 at) { return (float *)(place + at); }
