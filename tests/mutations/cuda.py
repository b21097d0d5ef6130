"""Mutations of the CUDA kernels, which run on fibers: missing barriers, copies read too early, work divided wrongly."""

from .mutation import Mutation, mutations

PARITY = "tests/kernels/test_parity.py -k cuda"
BLOCK = "tests/kernels/test_parity.py -k 'cuda and block'"
COUPLED = "tests/kernels/test_parity.py -k 'cuda and coupled'"
FILTERS = "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cuda"
PENALTIES = "tests/kernels/test_penalties.py tests/kernels/test_parity.py -k cuda"
LISTED = "tests/kernels/test_parity.py -k 'cuda and (listed or compact or reduced)'"
FLAT = "tests/simt/test_simt.py -k flat"
BY_ROWS = "tests/simt/test_by_rows.py"
PLAN = "tests/kernels/test_launch_plan.py"
TREES = "tests/kernels/test_trees.py -k 'parity and cuda'"
TREE_KERNELS = "tests/simt/test_tree_kernels.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "csrc/cuda/speculative_step.h",
        PARITY,
        {
            "cuda-rows-decided-before-they-are-measured": (
                "  if (fused) measure_rows(s, place);\n  simt::sync_cluster();",
                "  if (fused) measure_rows(s, place);\n  simt::sync_block();",
            ),
            "cuda-writes-to-blocks-that-may-not-run-yet": (
                "  simt::wait_cluster();  // now all blocks run, and may write to each other's memory\n  if (fused) measure_rows(s, place);\n",
                "  if (fused) measure_rows(s, place);\n  simt::wait_cluster();\n",
            ),
            "cuda-cutoffs-told-without-a-barrier": (
                "    simt::sync_block();\n  });\n  simt::sync_cluster();",
                "    simt::sync_block();\n  });",
                FILTERS,
            ),
            "cuda-block-leaves-while-others-read": (
                "  if (!place.first) simt::wait_cluster();",
                "",
            ),
            "cuda-waits-where-it-has-not-arrived": (
                "  simt::arrive_only();\n  const Place place",
                "  const Place place",
            ),
            "cuda-rows-measured-before-a-barrier-that-orders-nothing": (
                "  if (fused) measure_rows(s, place);\n  simt::sync_cluster();",
                "  if (fused) measure_rows(s, place);\n  simt::arrive_only();\n  simt::wait_cluster();",
            ),
            "cuda-a-block-draws-what-another-keeps": (
                "if (!s.target_row(end.j).drawn_here(block)) return;",
                "if (!place.first) return;",
            ),
            "cuda-race-in-position-and-offset": (
                "noise = {noise.seed, noise.position + noise.offset, 0};",
                "noise = {noise.seed, noise.position, 0};",
                COUPLED,
            ),
        },
    ),
    *mutations(
        "csrc/cuda/walk.h",
        PARITY,
        {
            "cuda-residual-read-before-it-is-weighed": (
                "weigh_residual(s, place, end.j, 1.0f, memory.residual, &turn);\n    simt::sync_cluster();",
                "weigh_residual(s, place, end.j, 1.0f, memory.residual, &turn);",
            ),
            "cuda-residual-weighed-while-it-is-read": (
                "return end;\n    simt::sync_cluster();\n    // A residual without mass",
                "return end;\n    // A residual without mass",
                "tests/simt/test_by_rows.py -k without_mass",
            ),
            "cuda-joint-tests-with-the-next-number": (
                "    u = row.u;\n",
                "    u = simt::read(&memory.examined[j + 1 < drafted ? j + 1 : j]).u;\n",
                BLOCK,
            ),
            "cuda-pairs-copied-over-what-lanes-still-read": (
                "      simt::sync_warp();  // all lanes have read the slots\n",
                "",
            ),
            "cuda-pairs-of-the-slot-after": ("*turn + 2 * pairs);", "*turn + 2 * pairs + 1);"),
            "cuda-pairs-of-the-block-after": (
                "copy_pair(block + pairs * place.all_warps, ",
                "copy_pair(block + (pairs + 1) * place.all_warps, ",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/ring.h",
        PARITY,
        {
            "cuda-copies-not-awaited": (
                "    simt::wait(arrival, round);\n",
                "    simt::sync_warp();\n",
            ),
            "cuda-pairs-awaited-in-the-first-round": ("turn / num_slots % 2", "0"),
        },
    ),
    *mutations(
        "csrc/cuda/formats.h",
        PARITY,
        {
            "cuda-tail-in-the-next-row": ("place_of(i) < size ?", "place_of(i) <= size ?"),
            "cuda-largest-of-even-places": ("Format::logit(largest, Format::kInWord - 1)", "Format::logit(largest, 0)"),
        },
    ),
    *mutations(
        "csrc/cuda/measure.h",
        PARITY,
        {
            "cuda-copy-over-what-lanes-still-read": (
                "      simt::sync_warp();  // all lanes have read the slot\n",
                "",
            ),
            "cuda-copies-awaited-in-the-first-round": ("number = 0, round ^= 1;", "number = 0;"),
            "cuda-copies-of-the-slot-before": (
                "place.my_warp + ring.num_slots * step, step)",
                "place.my_warp + (ring.num_slots - 1) * step, step)",
            ),
            "cuda-steps-within-a-row": ("row += stride, block -= num_blocks;", "block -= num_blocks;"),
            "cuda-rows-of-the-draft-follow-the-target": (
                "    if (item >= end && item < measured.items) *this = at(measured, item, step);\n",
                "",
            ),
            "cuda-last-block-is-whole": ("aligned ? static_cast<int>(rows.size / kBlock) : 0", "aligned ? n : 0"),
            "cuda-results-of-the-lane-before": ("if (lane == count) mine", "if (lane + 1 == count) mine"),
            "cuda-results-of-a-draft-beside-the-target": ("of_target ? item : item + gap", "item"),
            "cuda-more-results-than-lanes": ("++count == kWarp || ", ""),
            "cuda-results-of-later-items": (
                "my_item += kWarp * step, count = 0;",
                "count = 0;",
                "tests/simt/test_simt.py -k lanes",
            ),
            "cuda-results-in-one-block": (
                "block < simt::blocks_in_cluster(); ++block",
                "block < 1; ++block",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/kept.h",
        PARITY,
        {
            "cuda-kept-blocks-of-another-warp": (
                "slots + (warp % here.warps * num_slots",
                "slots + (here.warp * num_slots",
                FILTERS,
            ),
            "cuda-kept-blocks-of-this-block": (
                "return block == simt::block_in_cluster() ? place : simt::in_block(place, block);",
                "return place;",
                FILTERS,
            ),
        },
    ),
    *mutations(
        "csrc/cuda/rows.h",
        PARITY,
        {
            "cuda-penalties-twice-for-a-draft-that-is-listed": ("return before ? -1 : id;", "return id;", PENALTIES),
            "cuda-lists-miss-the-last-of-a-block": (
                "end + (sorted[end] <= last)",
                "end + (sorted[end] < last)",
                LISTED,
            ),
            "cuda-own-block-read-while-it-is-adjusted": (
                "place), simt::read(its)));\n  }\n  simt::sync_warp();",
                "place), simt::read(its)));\n  }",
                PENALTIES,
            ),
            "cuda-ends-of-the-first-sequence": ("sampling->ends + b * sampling->num_ends", "sampling->ends", PENALTIES),
        },
    ),
    *mutations(
        "csrc/cuda/granules.h",
        "tests/simt/test_simt.py -k anywhere",
        {
            "cuda-shifted-rows-off-by-one-element": (">> 8 * (shift & 2)", ">> 8 * (shift & 1)"),
            "cuda-odd-rows-end-with-zero": ("padding >> lane % 2 * 16 & 0xffffu", "0u"),
            "cuda-granules-end-behind-the-row": (
                "there / kGranule * kGranule, there % kGranule",
                "(there + 15) / 16 * 16, 0",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/row_draws.h",
        "tests/simt/test_simt.py -k anywhere",
        {
            "cuda-slots-without-the-granule-that-a-shift-needs": ("(aligned(rows) ? 0 : kGranule)", "0"),
        },
    ),
    *mutations(
        "csrc/cuda/verify.h",
        LISTED,
        {
            "cuda-listed-q-read-while-it-is-subtracted": ("q_of(at)));\n  }\n  simt::sync_warp();", "q_of(at)));\n  }"),
            "cuda-cutoff-of-a-draft-row-with-a-fault": (
                "    const int64_t k = s.params.num_drafts_max;\n",
                "    const int64_t k = s.params.num_drafts_max;\n    s.q_of(j);\n",
                "tests/simt/test_simt.py -k no_cutoff",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/sequence.h",
        PARITY,
        {
            "cuda-q-from-the-row-before": (
                "return {params.draft.row(b, j),",
                "return {params.draft.row(b, j > 0 ? j - 1 : j),",
            ),
            "cuda-distributions-of-drafts-of-the-target": (
                "return p_of(params.num_drafts_max + 1 + j);",
                "return p_of(j);",
            ),
            "cuda-slots-for-the-target-alone": (
                "if (!weighs_drafts(params)) return {blocks, bytes, own_copy, of_row, rows};",
                "if (!weighs_drafts(params)) return {blocks, of_target, own_copy, of_row, rows};",
                "tests/simt/test_simt.py -k slots",
            ),
            "cuda-rows-with-filters-one-by-one": (
                "params.rule == kRuleCoupled || params.sampling.filters != nullptr ||",
                "params.rule == kRuleCoupled ||",
                PLAN,
            ),
        },
    ),
    *mutations(
        "csrc/cuda/draws.h",
        COUPLED,
        {
            "cuda-likely-losers-never-race": ("weight * 0x1.01p33f >= score", "weight * 0x1.01p2f >= score"),
            "cuda-race-of-the-last-block-alone": (
                "  Candidate best = before;\n#pragma unroll\n  for (int i = 0; i < kEach; i += 4) {",
                "  Candidate best = 0;\n#pragma unroll\n  for (int i = 0; i < kEach; i += 4) {",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/select.h",
        FILTERS,
        {
            "cuda-histogram-counted-while-it-is-cleared": (
                "sums.clear();\n      simt::sync_block();",
                "sums.clear();",
            ),
            "cuda-copies-counted-while-they-are-cleared": (
                "copies.clear();\n      simt::sync_block();",
                "copies.clear();",
                FLAT,
            ),
            "cuda-list-without-an-end": ("    if (place + all > kListed) return;\n", "", FLAT),
            "cuda-full-list-is-taken-for-whole": (
                "*in_list = *in_list || simt::read(&memory->size) <= kListed;",
                "*in_list = true;",
                FLAT,
            ),
            "cuda-lanes-list-in-one-place": ("    place += before;\n", "    place += before / 2;\n"),
            "cuda-list-of-one-filter-for-the-next": ("if (first && lowest <= low) listed", "listed", FLAT),
            "cuda-left-to-a-bin-what-others-have": ("left > before ? left - before : 0", "left > before ? left : 0"),
            "cuda-left-overwritten-while-it-is-read": ("    simt::sync_warp();  // all lanes have read what", "    //"),
            "cuda-bound-one-too-high": ("if (rank == k - 1)", "if (rank == (k > 1 ? k - 2 : 0))"),
        },
    ),
    *mutations(
        "csrc/cuda/bins.h",
        FILTERS,
        {
            "cuda-one-bin-too-many": ("scale = (kBins - 1) / width", "scale = kBins / width"),
            "cuda-bin-with-the-next-ones-edge": (
                "first_key(bin - 1, lowest, last) - 1",
                "first_key(bin - 1, lowest, last)",
            ),
            "cuda-bin-begins-above-its-lowest": (
                "if (beyond > 0) first = key(beyond - 1) + 1",
                "first = key(beyond) + 1",
            ),
            "cuda-flat-rows-in-few-bins": ("if (linear && width", "if (!linear && width", FLAT),
            "cuda-carry-lost": (" + (before + low < low);  // with the carry", " + 0 * before;", FLAT),
            "cuda-carry-of-the-sum-before": ("before + low < low", "before < low", FLAT),
            "cuda-copies-not-added-up": ("i < (bin + 1) * copies", "i < bin * copies + 1", FLAT),
            "cuda-lanes-add-to-one-copy": ("(bin * copies + simt::thread() % copies)", "bin * copies", FLAT),
        },
    ),
    *mutations(
        "csrc/cuda/window.h",
        BY_ROWS,
        {
            "cuda-rows-overwritten-while-they-are-read": (
                "    simt::sync_warp();  // all lanes have read the slots\n",
                "",
            ),
            "cuda-slots-awaited-in-the-first-round": ("return number >= num_slots; }", "return 0; }"),
            "cuda-two-rows-of-the-target-for-a-pair": (
                "copy(slot(ahead), s.draft_row(next_row)",
                "copy(slot(ahead), s.target_row(next_row)",
            ),
            "cuda-mass-of-shifted-rows-without-the-shift": (
                "plain && block < whole_blocks",
                "plain && (block + 1) * kBlock <= s.params.vocabulary",
            ),
            "cuda-near-block-read-as-if-aligned": (
                "        if (block < whole_blocks)",
                "        if ((block + 1) * kBlock <= s.params.vocabulary)",
            ),
            "cuda-slots-of-one-row-for-a-pair": ("release(rows() * mine)", "release(mine)"),
            "cuda-draft-read-before-it-replaces-a-row": ("slot(of_q).arrived(round(of_q) ^ 1)", "slot(of_q).data"),
            "cuda-row-before-the-next-is-brought-back": (
                "replace_next(s.target_row(j + 1))",
                "replace_next(s.target_row(j))",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/by_rows.h",
        BY_ROWS,
        {
            "cuda-row-decided-before-it-is-measured": ("    if (!window->behind) window->wait();\n", ""),
            "cuda-row-decided-with-the-one-behind": ("window->behind ? measured - 1 : measured;", "measured;"),
            "cuda-last-row-is-not-measured": ("if (measured <= s.limit)", "if (measured < s.limit)"),
            "cuda-rows-in-flight-when-the-block-ends": ("  window.drain();\n", ""),
            "cuda-block-leaves-before-the-last-statistics": ("  window.wait();  // no block", "  // no block"),
            "cuda-replaced-row-is-not-brought-back": ("  window->restore_next(j);\n", ""),
            "cuda-next-residual-weighed-while-one-is-read": (
                "  if (window->behind) window->arrive();  // no block",
                "  // no block",
            ),
            "cuda-residual-without-mass-ends-the-walk": (
                "s.memory.n) > 0.0f) return false;",
                "s.memory.n) >= 0.0f) return false;",
            ),
            "cuda-rows-joint-ratio-of-one-draft": (
                "      w = joint_ratio(w, row.log_p, row.log_q);",
                "      w = joint_ratio(1.0f, row.log_p, row.log_q);",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/row_draws.h",
        BY_ROWS,
        {
            "cuda-rows-without-a-slot-for-each-block": (
                "slots_of(rows, n, all_warps) <= num_slots && rows",
                "rows",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/plan.h",
        PLAN,
        {
            "cuda-own-blocks-are-not-counted": ("return warps * items.own_copy + cut_memory", "return cut_memory"),
            "cuda-deciding-blocks-wait-for-measuring-ones": ("(dependent ? batch : 0)", "0"),
            "cuda-half-a-multiprocessor-takes-all": (
                "const int64_t limit = many ? machine.half_of_it : machine.shared_memory;",
                "const int64_t limit = machine.shared_memory;",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/tree_rows.h",
        TREES,
        {
            "cuda-trees-keep-the-rejected-child-in-q": (
                "simt::read(&visit->removed) + 1, block, q);",
                "simt::read(&visit->removed), block, q);",
            ),
            "cuda-trees-take-the-child-below-for-its-parent": (
                "simt::read(&s.memory.next->near) == reading_of(s).row",
                "simt::read(&s.memory.next->near) >= 0",
                TREE_KERNELS,
            ),
        },
    ),
    *mutations(
        "csrc/cuda/tree_rules.h",
        TREES,
        {
            "cuda-trees-draw-from-the-residual-before": (
                "now.residual = 1 - now.residual;",
                "now.residual = now.residual;",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/arrivals.h",
        TREE_KERNELS,
        {
            "cuda-arrivals-exceed-the-list": (
                "lists = above + inside <= kMostArrivals;",
                "lists = above + inside > 0;",
            ),
            "cuda-arrivals-of-the-bin-beyond-count-twice": ("return x - low < size;", "return x >= low;"),
            "cuda-arrivals-of-block-0-alone": (
                "for (int block = 1; block < simt::blocks_in_cluster(); ++block) {\n    const ArrivalsMemory",
                "for (int block = 1; block < 1; ++block) {\n    const ArrivalsMemory",
            ),
        },
    ),
]
