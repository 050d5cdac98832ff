// The training of hsdp_tp.cpp and elastic.cpp but for its collectives: the images of digits and
// their batches, and what one rank has and computes of an MLP 64-128-10. Include the device
// (device_cpu.h or device_cuda.h) first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#ifndef DM_EXAMPLE_DATA  // where the images are when --data does not say; the Makefile gives the full path
#define DM_EXAMPLE_DATA "examples/data/digits.csv"
#endif

namespace {

constexpr int kPixels = 64, kHidden = 128, kDigits = 10;
constexpr int kTrain = 1440;  // of 1797 images; the rest tests
constexpr int kBatch = 60;    // over all data-parallel ranks
constexpr float kRate = 0.05f, kMomentum = 0.9f;

[[noreturn]] void fail(const std::string &message)
{
  std::fprintf(stderr, "error: %s\n", message.c_str());
  std::exit(1);
}

// ---- data ----

struct Digits {
  std::vector<float> pixels;  // [images, 64], 0 to 1
  std::vector<float> labels;  // [images]
  int count() const { return static_cast<int>(labels.size()); }
};

Digits read_digits(const std::string &path)
{
  std::ifstream file(path);
  if (!file) fail("cannot read " + path + " (say where digits.csv is with --data)");
  Digits digits;
  std::string line, field;
  while (std::getline(file, line)) {
    std::stringstream fields(line);
    std::vector<float> numbers;
    while (std::getline(fields, field, ',')) numbers.push_back(std::strtof(field.c_str(), nullptr));
    if (numbers.size() != kPixels + 1) fail(path + ": a line with " + std::to_string(numbers.size()) + " numbers instead of 65");
    for (int pixel = 0; pixel < kPixels; ++pixel) digits.pixels.push_back(numbers[pixel] / 16.0f);
    digits.labels.push_back(numbers[kPixels]);
  }
  if (digits.count() <= kTrain) fail(path + " has " + std::to_string(digits.count()) + " images; more than 1440 are needed");
  return digits;
}

// The order of the images, which all ranks have alike: the first 1440 train, shuffled anew in each
// epoch, and the others test.
class Order {
public:
  explicit Order(int images) : images_(images) { restart(); }

  // A rank that goes back to an earlier epoch begins anew.
  const std::vector<int> &in_epoch(int epoch)
  {
    if (epoch < epoch_) restart();
    for (; epoch_ < epoch; ++epoch_) shuffle(kTrain);
    return order_;
  }

private:
  void restart()
  {
    random_.seed(7);
    order_.resize(images_);
    std::iota(order_.begin(), order_.end(), 0);
    shuffle(images_);
    epoch_ = -1;
  }

  void shuffle(int count)
  {
    for (int at = count - 1; at > 0; --at) std::swap(order_[at], order_[random_() % (at + 1)]);
  }

  int images_, epoch_ = -1;
  std::vector<int> order_;
  std::mt19937 random_;
};

// ---- the model: this rank's tensor-parallel part, flat, sharded ----

// The part of the hidden units that this tp rank has, one after another in one flat array: w1 [64,
// units], b1 [units], w2 [units, 10], b2 [10]. b2 is the same on every tp rank.
struct Parts {
  int units;
  std::size_t w1() const { return 0; }
  std::size_t b1() const { return w1() + static_cast<std::size_t>(kPixels) * units; }
  std::size_t w2() const { return b1() + units; }
  std::size_t b2() const { return w2() + static_cast<std::size_t>(units) * kDigits; }
  std::size_t count() const { return b2() + kDigits; }
};

// Makes the full weights, which do not depend on the mesh, and gives this tp rank's part of them.
std::vector<float> initial_part(const Parts &parts, int tp_rank)
{
  std::mt19937 random(20240607);
  auto uniform = [&random](float limit) {
    return limit * (2.0f * static_cast<float>(random() >> 8) / static_cast<float>(1 << 24) - 1.0f);
  };
  std::vector<float> w1(static_cast<std::size_t>(kPixels) * kHidden), w2(static_cast<std::size_t>(kHidden) * kDigits);
  for (float &weight : w1) weight = uniform(std::sqrt(6.0f / kPixels));
  for (float &weight : w2) weight = uniform(std::sqrt(6.0f / (kHidden + kDigits)));

  std::vector<float> part(parts.count(), 0.0f);
  const int first = tp_rank * parts.units;
  for (int pixel = 0; pixel < kPixels; ++pixel)  // columns of w1
    for (int unit = 0; unit < parts.units; ++unit)
      part[parts.w1() + static_cast<std::size_t>(pixel) * parts.units + unit] =
          w1[static_cast<std::size_t>(pixel) * kHidden + first + unit];
  for (int unit = 0; unit < parts.units; ++unit)  // rows of w2
    for (int digit = 0; digit < kDigits; ++digit)
      part[parts.w2() + static_cast<std::size_t>(unit) * kDigits + digit] = w2[static_cast<std::size_t>(first + unit) * kDigits + digit];
  return part;
}

// Device memory that frees itself.
struct Buffer {
  float *data;
  explicit Buffer(std::size_t count) : data(device::allocate(count)) {}
  ~Buffer() { device::release(data); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
};

// Where a rank is along a dimension, and how many ranks are there.
struct Place {
  int rank, size;
};

// What one rank has of the network, and what it computes alone. The caller makes the collectives
// between the calls.
class Network {
  Parts parts;

public:
  const int rows;            // of each batch, that this rank takes
  const std::size_t piece;   // of the flat array, that this rank keeps; the last one is padded
  const std::size_t padded;  // the flat array of all pieces

  Buffer weights, gradient;            // the whole part: only while it is used
  Buffer mine, my_gradient, velocity;  // what this rank keeps
  Buffer logits, sums;                 // [images, 10]; the sum of the losses or hits is sums[0]

  Network(const Digits &digits, Place data, Place shard, Place tp)
      : parts{kHidden / tp.size},
        rows(kBatch / data.size),
        piece((parts.count() + shard.size - 1) / shard.size),
        padded(piece * shard.size),
        weights(padded), gradient(padded), mine(piece), my_gradient(piece), velocity(piece),
        logits(most(digits) * kDigits), sums(2), digits_(digits), data_(data),
        images_(most(digits) * kPixels), labels_(most(digits)), losses_(most(digits)), hits_(most(digits)),
        hidden_(most(digits) * parts.units), hidden_gradient_(most(digits) * parts.units)
  {
    if (kHidden % tp.size != 0) fail("tp=" + std::to_string(tp.size) + " does not divide the 128 hidden units");
    if (kBatch % data.size != 0) fail("replicate*shard=" + std::to_string(data.size) + " does not divide the batch of 60");
    std::vector<float> start = initial_part(parts, tp.rank);
    start.resize(padded, 0.0f);
    device::upload(mine.data, start.data() + piece * shard.rank, piece);
  }

  // This rank's rows of the batch that begins at `batch`.
  void load_batch(const std::vector<int> &order, int batch) { load(order, batch + data_.rank * rows, rows); }

  // All test images. Returns how many there are.
  int load_tests(const std::vector<int> &order)
  {
    load(order, kTrain, digits_.count() - kTrain);
    return count_;
  }

  // hidden = relu(images w1 + b1), and this tp rank's part of logits = hidden w2.
  void forward()
  {
    float *w = weights.data;
    device::matmul(hidden_.data, images_.data, false, w + parts.w1(), false, count_, kPixels, parts.units);
    device::bias_relu(hidden_.data, w + parts.b1(), count_, parts.units);
    device::matmul(logits.data, hidden_.data, false, w + parts.w2(), false, count_, parts.units, kDigits);
  }
  std::size_t num_logits() const { return static_cast<std::size_t>(count_) * kDigits; }

  // Leaves the gradient of the logits in their place, the same on all tp ranks.
  void loss()
  {
    device::softmax_cross_entropy(logits.data, weights.data + parts.b2(), labels_.data, count_, kDigits, 1.0f / kBatch, losses_.data,
                                  hits_.data);
  }

  void backward()
  {
    float *w = weights.data, *g = gradient.data;
    device::matmul(g + parts.w2(), hidden_.data, true, logits.data, false, parts.units, rows, kDigits);
    device::column_sum(g + parts.b2(), logits.data, rows, kDigits);
    device::matmul(hidden_gradient_.data, logits.data, false, w + parts.w2(), true, rows, kDigits, parts.units);
    device::relu_backward(hidden_gradient_.data, hidden_.data, static_cast<std::size_t>(rows) * parts.units);
    device::matmul(g + parts.w1(), images_.data, true, hidden_gradient_.data, false, kPixels, rows, parts.units);
    device::column_sum(g + parts.b1(), hidden_gradient_.data, rows, parts.units);
  }

  void update() { device::sgd(mine.data, velocity.data, my_gradient.data, piece, kRate, kMomentum); }

  void sum_losses() { device::column_sum(sums.data, losses_.data, count_, 1); }
  void sum_hits() { device::column_sum(sums.data, hits_.data, count_, 1); }
  float sum() const
  {
    float sum = 0;
    device::download(&sum, sums.data, 1);
    return sum;
  }

private:
  static std::size_t most(const Digits &digits) { return std::max(kBatch, digits.count() - kTrain); }

  void load(const std::vector<int> &order, int first, int count)
  {
    std::vector<float> pixels, digit;
    for (int at = first; at < first + count; ++at) {
      const float *image = digits_.pixels.data() + static_cast<std::size_t>(order[at]) * kPixels;
      pixels.insert(pixels.end(), image, image + kPixels);
      digit.push_back(digits_.labels[order[at]]);
    }
    device::upload(images_.data, pixels.data(), pixels.size());
    device::upload(labels_.data, digit.data(), digit.size());
    count_ = count;
  }

  const Digits &digits_;
  Place data_;
  int count_ = 0;  // of the images that are loaded
  Buffer images_, labels_, losses_, hits_, hidden_, hidden_gradient_;
};

}  // namespace
