// What the recurrences share: how a warp takes the tokens of a row, one after the other, into a tile of a state, which
// stays in its registers meanwhile; and what is stored at the end.
//
// The tiles of a state do not depend on each other. The warps of a block have neighbouring tiles, unless the tokens are
// a tree: then all of them have the same tile, and each walks from the state before `start` to leaves of its own. So
// what a tile's tokens give does not depend on who else walks, and one warp stores the state that stays.
#pragma once

#include "numbers.h"

namespace specdec::cuda {

constexpr int kScanThreads = 128, kStoreThreads = 256;

// How many threads the scans' kernels are compiled for, which is what limits their registers: to 128, so that there is
// room for 16 warps on a multiprocessor, or, where a thread has 64 numbers of a state, to 255.
constexpr int kBoundOfSmallTiles = 512, kBoundOfLargeTiles = 256;

// The column of a token's parent; -1 if it has none in the tree. It ends every walk that a caller's error would begin.
SPECDEC_DEVICE int parent_of(const Feed& feed, int64_t row, int column) {
  const int64_t parent = feed.parents[row * feed.columns + column];
  return parent >= 0 && parent < column ? static_cast<int>(parent) : -1;
}

// By a warp: whether no token of the tree follows the one in this column.
SPECDEC_DEVICE bool is_leaf(const Feed& feed, int64_t row, int column) {
  const bool* valid = feed.valid + row * feed.columns;
  if (!valid[column]) return false;
  for (int first = column + 1; first < feed.columns; first += kWarp) {
    const int other = first + simt::thread() % kWarp;
    if (simt::ballot(other < feed.columns && valid[other] && parent_of(feed, row, other) == column)) return false;
  }
  return true;
}

// The leaf after this column that comes after so many others; feed.columns if there is none.
SPECDEC_DEVICE int leaf_after(const Feed& feed, int64_t row, int column, int others) {
  while (++column < feed.columns) {
    if (is_leaf(feed, row, column) && others-- == 0) break;
  }
  return column;
}

// The columns of the fed tokens that a warp takes, in their order.
struct Path {
  const int32_t* columns;  // in shared memory, or null for all columns from 0 on, of which some are no tokens
  int length;

  SPECDEC_DEVICE int operator[](int i) const { return columns == nullptr ? i : simt::read(&columns[i]); }
};

// By a warp: the path to a leaf. `memory` has room for all columns.
SPECDEC_DEVICE Path path_to(const Feed& feed, int64_t row, int leaf, int32_t* memory) {
  const int columns = static_cast<int>(feed.columns);
  int length = 0;
  simt::sync_warp();  // all lanes have read the path before
  for (int column = leaf; column >= 0; column = parent_of(feed, row, column)) {
    ++length;
    if (simt::thread() % kWarp == 0) simt::write(&memory[columns - length], column);
  }
  simt::sync_warp();
  return {memory + columns - length, length};
}

// Takes the tokens into the tile. The state stays that has the first `kept` of them, if it is not 0 of them.
template <class Tile>
SPECDEC_DEVICE void take_tokens(Tile* tile, const Feed& feed, int64_t row, const FedRow& stands, const Path& path,
                                int kept) {
  const bool* valid = feed.valid + row * feed.columns;
  const int lacking = static_cast<int>(stands.start - stands.begin), all = lacking + path.length;
  const int places = static_cast<int>(feed.places);
  int place = static_cast<int>(stands.begin % feed.places);
#pragma unroll 1
  for (int i = 0; i < all; ++i) {
    const bool of_window = i < lacking;
    const int column = of_window ? 0 : path[i - lacking];
    const int64_t at = of_window ? (feed.first_row + row) * feed.places + place : row * feed.columns + column;
    if (++place == places) place = 0;
    if (of_window || valid[column]) tile->take(at, of_window);
    if (i + 1 == kept) tile->store();
  }
}

// By a block: the tokens of a row and of the tile, or the tiles, that are the block's. A row's state is divided among
// `groups`, and a group's among `parts` tiles.
template <class Tile, class Params>
SPECDEC_DEVICE void scan(const Params& params, int groups, int parts) {
  const Feed& feed = params.feed;
  const bool tree = feed.parents != nullptr;
  const int warp = simt::thread() / kWarp, warps = simt::num_threads() / kWarp;
  const int blocks = tree ? parts : (parts + warps - 1) / warps, columns = static_cast<int>(feed.columns);
  const int block = static_cast<int>(simt::cluster()), part = block % blocks;
  const int64_t row = block / blocks / groups, held = feed.first_row + row;
  const bool* valid = feed.valid + row * columns;
  Tile tile(params, row, block / blocks % groups, tree ? part : part * warps + warp);
  bool fed = false;
  for (int column = 0; column < columns; ++column) {
    if (valid[column]) {
      fed = true;
    } else if (!tree || warp == 0) {
      tile.clear(row * columns + column);
    }
  }
  if (!fed) return;
  FedRow stands = fed_row(params.base[held], feed.start[row], feed.commit[row], feed.places);
  const int committed = static_cast<int>(stands.commit - stands.begin);
  const int all = static_cast<int>(stands.start - stands.begin) + columns;
  Path path = {nullptr, columns};
  int leaf = tree ? leaf_after(feed, row, -1, warp) : 0;
  for (bool first = true;; first = false) {
    tile.load(first ? stands.from_nothing : stands.commit == 0);
    if (tree && first) simt::sync_block();  // all have read the state before one of them writes it
    if (leaf < columns) {
      if (tree) path = path_to(feed, row, leaf, reinterpret_cast<int32_t*>(simt::shared_memory()) + warp * columns);
      const bool keeps = first && (!tree || warp == 0);
      take_tokens(&tile, feed, row, stands, path, !keeps ? 0 : params.keep ? all : committed);
    }
    if (!tree) return;
    if (first) {
      simt::sync_block();  // those that go on read what stays
      if (committed > 0) stands.begin = stands.commit;
    }
    if (leaf < columns) leaf = leaf_after(feed, row, leaf, warps - 1);
    if (leaf >= columns) return;
  }
}

// How a scan is launched.
template <class Kernel>
struct Scan {
  Kernel* kernel;
  int64_t groups, parts;

  int64_t blocks(const Feed& feed, int warps) const {
    return feed.rows * groups * (feed.parents != nullptr ? parts : (parts + warps - 1) / warps);
  }
  // Bytes of shared memory: for the path of each warp.
  static int64_t shared(const Feed& feed, int warps) {
    return feed.parents != nullptr ? warps * feed.columns * static_cast<int64_t>(sizeof(int32_t)) : 0;
  }
};

// ---- What follows in a launch of its own: no block of the scan is left that could read what is overwritten here

struct StoreParams {
  struct Input {
    const char* from;  // [rows, columns, bytes]
    char* to;          // [R, places, bytes]
    int64_t bytes;
  };
  Input inputs[4];
  int count;
  int64_t* base;  // [R]
  Feed feed;
  bool keep;

  // `numbers`: of a token.
  static Input input(const Numbers& from, const Numbers& to, int64_t numbers) {
    return {from.data, to.data, numbers * size_in_bytes(from.dtype)};
  }
};

// By a block.
SPECDEC_DEVICE void copy_bytes(const char* from, char* to, int64_t bytes) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | bytes;
  if (all % sizeof(simt::Bytes16) == 0) {
    for (int64_t i = simt::thread() * 16; i < bytes; i += simt::num_threads() * 16) {
      simt::store16(to + i, simt::load16(from + i));
    }
  } else {
    for (int64_t i = simt::thread(); i < bytes / 2; i += simt::num_threads()) {
      reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
    }
  }
}

// A block for each token notes how many tokens the states contain, if it is the first one of its row, and stores the
// inputs, if the token may be rolled back.
SPECDEC_KERNEL(store_inputs_kernel, kStoreThreads, StoreParams) {
  const Feed& feed = params.feed;
  const int64_t at = simt::cluster(), row = at / feed.columns, column = at % feed.columns;
  const bool* valid = feed.valid + row * feed.columns;
  if (!valid[column]) return;
  int64_t before = 0, count = 0;
  for (int64_t other = 0; other < feed.columns; ++other) {
    if (!valid[other]) continue;
    if (params.keep && other < column) return;
    ++count;
    before += other < column;
  }
  const int64_t held = feed.first_row + row, start = feed.start[row];
  if (before == 0 && simt::thread() == 0) {
    int64_t& base = params.base[held];
    base = params.keep ? start + count : fed_row(base, start, feed.commit[row], feed.places).commit;
  }
  const int64_t number = feed.parents != nullptr ? column : before;
  if (params.keep || number < count - feed.places) return;  // another token will be there
  for (int i = 0; i < params.count; ++i) {
    const StoreParams::Input& input = params.inputs[i];
    copy_bytes(input.from + at * input.bytes,
               input.to + (held * feed.places + (start + number) % feed.places) * input.bytes, input.bytes);
  }
}

}  // namespace specdec::cuda
