// What a pass of many tokens makes of its experts' work: pairs of a token and a place, sorted by expert, cut
// into tiles of pairs of one expert.

#pragma once

#include "common.cuh"

#define TILE 128  // pairs of a tile at most

struct Tile {
    int expert;  // among those that are held; their number: nobody's pairs; -1: no tile
    int begin;   // of the sorted pairs
    int count;
    int unused;
};
