/* ranks: 8 */
// The typed collectives: their results over containers and pointers, every element type, groups,
// and buffers that do not fit.
#include "check.hpp"

#include <array>
#include <numeric>
#include <string>
#include <vector>

struct Half {
  std::uint16_t bits;
};
template <> struct dm::DtypeOf<Half> {
  static constexpr dm::Dtype value = dm::Dtype::float16;
};

static_assert(dm::DtypeOf<char>::value == (std::is_signed_v<char> ? dm::Dtype::int8 : dm::Dtype::uint8));
static_assert(dm::DtypeOf<signed char>::value == dm::Dtype::int8 && dm::DtypeOf<std::byte>::value == dm::Dtype::uint8);
static_assert(dm::DtypeOf<long long>::value == dm::Dtype::int64 && dm::DtypeOf<unsigned long>::value == dm::Dtype::uint64);

template <class T> static void sums(const dm::Mesh &mesh, T each, T expected)
{
  std::vector<T> values(3, each), out(3);
  mesh.all_reduce("tp", values, out);
  CHECK(values == std::vector<T>(3, each) && out == std::vector<T>(3, expected));
  mesh.all_reduce("tp", values);
  CHECK(values == out);
}

int main()
{
  return run([] {
    const char *given = std::getenv("WORLD_SIZE");
    const int world_size = given == nullptr ? 1 : std::atoi(given);
    const dm::Mesh mesh = dm::init("cpu", {{"dp", world_size / 4}, {"tp", 4}}), tp = mesh["tp"];
    const std::int32_t me = tp.local_rank();
    const std::size_t my_place = static_cast<std::size_t>(me);

    sums<std::int8_t>(mesh, 1, 4);
    sums<std::uint8_t>(mesh, 50, 200);
    sums<std::int32_t>(mesh, -100000, -400000);
    sums<std::uint32_t>(mesh, 1u << 30, 0);
    sums<std::int64_t>(mesh, -(std::int64_t{1} << 40), -(std::int64_t{1} << 42));
    sums<std::uint64_t>(mesh, std::uint64_t{1} << 40, std::uint64_t{1} << 42);
    sums<float>(mesh, 0.5f, 2.0f);
    sums<double>(mesh, 0.25, 1.0);
    std::array<Half, 1> one{{{0x3c00}}};
    mesh.all_reduce("tp", one);
    CHECK(one[0].bits == 0x4400); /* 4 */

    std::array<double, 2> pair{me + 1.0, 2.0};
    mesh.all_reduce("tp", pair, dm::Op::prod);
    CHECK(pair[0] == 24 && pair[1] == 16);
    float array[2] = {static_cast<float>(me), 1};
    mesh.all_reduce("tp", array, dm::Op::max);
    CHECK(array[0] == 3);
    // Arrays with a count, and the literal 0 as a rank.
    const float fixed[2] = {7, static_cast<float>(me)};
    float changing[2] = {8, static_cast<float>(me)}, taken[2] = {};
    mesh.broadcast("tp", changing, taken, 2, 0);
    CHECK(taken[0] == 8 && taken[1] == 0);
    mesh.broadcast("tp", fixed, taken, 2, 0);
    CHECK(taken[0] == 7 && taken[1] == 0);
    mesh.broadcast("tp", me == 0 ? fixed : nullptr, taken, 1, 0);
    float arrived[4][5] = {};
    mesh.group([&] {
      mesh.send("tp", changing, 2, 0);
      mesh.send("tp", fixed, 2, 0, nullptr);
      mesh.send("tp", &changing[1], 1, 0);
      for (int from = 0; me == 0 && from < 4; ++from) {
        mesh.recv("tp", arrived[from], 2, from);
        mesh.recv("tp", &arrived[from][2], 2, from);
        mesh.recv("tp", &arrived[from][4], 1, from);
      }
    });
    CHECK(me != 0 || (arrived[3][0] == 8 && arrived[3][2] == 7 && arrived[3][4] == 3));
    mesh.all_reduce("tp", &array[0], &array[1], 1, dm::Op::avg);
    CHECK(array[1] == 3);
    mesh.all_reduce("tp", dm::Span<float>(array, 1), dm::Op::min);

    // On a mesh with one dimension nullptr stands for its name.
    const std::vector<std::int32_t> mine = {me, me + 10};
    std::vector<std::int32_t> all(8), blocks(8), back(2);
    tp.all_gather(nullptr, mine, all);
    CHECK((all == std::vector<std::int32_t>{0, 10, 1, 11, 2, 12, 3, 13}));
    tp.all_gather(nullptr, mine.data(), blocks.data(), 2);
    CHECK(blocks == all);
    tp.reduce_scatter(nullptr, all, back);
    CHECK(back[0] == 4 * me && back[1] == 4 * (me + 10));
    tp.reduce_scatter("tp", all.data(), back.data(), 2, dm::Op::max);
    CHECK(back == mine);
    tp.all_to_all("tp", all, blocks);
    for (std::size_t at = 0; at < 4; ++at) CHECK(blocks[2 * at] == me && blocks[2 * at + 1] == me + 10);
    tp.all_to_all("tp", all.data(), blocks.data(), 2);
    CHECK(blocks[7] == me + 10);

    // Counts for each rank: rank r sends r + p elements to rank p, and has r elements to gather.
    const std::vector<std::size_t> ragged = {my_place, my_place + 1, my_place + 2, my_place + 3}, ranks = {0, 1, 2, 3};
    const std::vector<std::int32_t> out(4 * my_place + 6, me), own(my_place, me + 1);
    std::vector<std::int32_t> into(out.size(), -1), six(6, -1), expected;
    for (std::int32_t rank = 0; rank < 4; ++rank) expected.insert(expected.end(), my_place + static_cast<std::size_t>(rank), rank);
    tp.all_to_allv("tp", out, ragged, into, ragged);
    CHECK(into == expected);
    tp.all_gatherv(nullptr, own, six, {0, 1, 2, 3});
    CHECK((six == std::vector<std::int32_t>{2, 3, 3, 4, 4, 4}));
    std::vector<std::int32_t> reduced(my_place, -1);
    tp.reduce_scatterv("tp", six, ranks, reduced);
    CHECK(reduced == std::vector<std::int32_t>(my_place, 4 * (me + 1)));
    into.assign(into.size(), -1);
    tp.group([&] {
      tp.all_to_allv("tp", out, ragged, into, ragged);
      tp.reduce_scatterv("tp", six, std::vector<std::size_t>{0, 1, 2, 3}, reduced, dm::Op::avg);
    });
    CHECK(into == expected && reduced == std::vector<std::int32_t>(my_place, me + 1));
    std::vector<std::int32_t> twelve(12);
    const std::vector<std::size_t> two_counts(2, 1), ones(4, 1), threes(4, 3);
    THROWS(dm::Status::invalid_argument, "send has 2 counts, but the dimension has 4 ranks",
           tp.all_to_allv("tp", out, two_counts, into, ragged));
    THROWS(dm::Status::invalid_argument, "not the sum of its counts", tp.all_gatherv("tp", own, six, ones));
    THROWS(dm::Status::invalid_argument, "but the count of this rank is 3", tp.all_gatherv("tp", mine, twelve, threes));

    std::vector<float> root_only(me == 2 ? 1 : 0), value = {1};
    tp.reduce("tp", value, root_only, 2);
    CHECK(me != 2 || root_only[0] == 4);
    tp.reduce("tp", value.data(), root_only.data(), 1, 2, dm::Op::avg);
    CHECK(me != 2 || root_only[0] == 1);
    value[0] = static_cast<float>(me);
    tp.broadcast("tp", value, 3);
    CHECK(value[0] == 3);
    if (me == 2) root_only[0] = 7;
    tp.broadcast("tp", root_only, value, 2);
    CHECK(value[0] == 7);
    tp.broadcast("tp", static_cast<const float *>(nullptr), value.data(), 0, 2);
    tp.broadcast("tp", nullptr, value.data(), 0, 2);

    // Messages go around a ring, with each way to write a group.
    const std::int32_t next = (me + 1) % 4, before = (me + 3) % 4;
    std::vector<std::int32_t> got(2, -1);
    tp.group([&] {
      tp.send("tp", mine, next);
      tp.recv("tp", got, before);
    });
    CHECK(got[0] == before && got[1] == before + 10);
    tp.group_start();
    tp.send("tp", mine.data(), 1, before);
    tp.recv("tp", got.data(), 1, next);
    tp.group_end();
    CHECK(got[0] == next);
    const dm::nothrow::Mesh quiet(tp.clone().release());
    const dm::Result<void> done = quiet.group(
        [&] { return quiet.send("tp", mine, next).and_then([&] { return quiet.recv("tp", got, before); }); });
    CHECK(done.has_value() && got[0] == before);

    // Leaving a group's scope early ends the group, so later operations are not part of it.
    struct Stop {};
    try {
      tp.group([] { throw Stop{}; });
      CHECK(false);
    } catch (const Stop &) {
    }
    REFUSED(dm::Status::invalid_argument, "send: none", quiet.group([]() -> dm::Result<void> {
      return dm::Error(dm::Status::invalid_argument, "send: none");
    }));
    THROWS(dm::Status::invalid_state, "begun no group", tp.group_end());

    // Buffers that do not fit are refused before anything is sent: only one rank needs to be wrong.
    if (me == 1) {
      std::vector<float> two(2), three(3), seven(7), eight(8);
      THROWS(dm::Status::invalid_argument, "all_reduce: recv has 3 elements, send has 2", mesh.all_reduce("tp", two, three));
      THROWS(dm::Status::invalid_argument, "all_gather: recv has 7 elements, not 4 (the ranks of the dimension) times the 2 of send",
             mesh.all_gather("tp", two, seven));
      THROWS(dm::Status::invalid_argument, "all_gather: recv has 8 elements", mesh.all_gather("tp", three, eight));
      THROWS(dm::Status::invalid_argument, "reduce_scatter: send has 7 elements, not 4 (the ranks of the dimension) times the 2 of recv",
             mesh.reduce_scatter("tp", seven, two));
      THROWS(dm::Status::invalid_argument, "all_to_all: recv has 7 elements, send has 8", mesh.all_to_all("tp", eight, seven));
      THROWS(dm::Status::invalid_argument, "which 4 ranks do not divide", mesh.all_to_all("tp", seven, seven));
      THROWS(dm::Status::invalid_argument, "reduce: recv has 3 elements, send has 2", mesh.reduce("tp", two, three, 1));
      THROWS(dm::Status::invalid_argument, "broadcast: recv has 3 elements, send has 2", mesh.broadcast("tp", two, three, 1));
      THROWS(dm::Status::not_found, "pp", mesh.all_gather("pp", two, eight));
      THROWS(dm::Status::invalid_argument, "has 2 dimensions: say which one", mesh.all_gather(nullptr, two, eight));
      THROWS(dm::Status::invalid_argument, "root", mesh.broadcast("tp", two, 4));
      THROWS(dm::Status::invalid_argument, "send is NULL", mesh.all_reduce("tp", static_cast<const float *>(nullptr), two.data(), 2));
    }
    CHECK(all[2 * my_place] == me);
    mesh.finalize();
  });
}
