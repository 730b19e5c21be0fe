// Data sets in sink mode: one queue of batches.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "cann.h"

namespace {
struct Item {
  std::vector<char> data;
};
using Batch = std::vector<Item *>;
std::mutex lock;
std::condition_variable queued;
std::deque<Batch> queue;
}  // namespace

// Copies the next batch into the outputs of a GetNext; fails if none comes.
Status next_batch(int count, void **buffers) {
  std::unique_lock<std::mutex> held(lock);
  if (!queued.wait_for(held, std::chrono::seconds(60), [] { return !queue.empty(); })) return 1;
  Batch batch = queue.front();
  queue.pop_front();
  for (int i = 0; i < count && i < static_cast<int>(batch.size()); i++) {
    auto *buffer = static_cast<Object *>(buffers[i]);
    memcpy(buffer->data, batch[i]->data.data(), std::min<size_t>(buffer->count, batch[i]->data.size()));
  }
  return 0;
}

extern "C" {
Batch *acltdtCreateDataset() { return new Batch; }
Status acltdtDestroyDataset(Batch *batch) {
  delete batch;
  return 0;
}
Item *acltdtCreateDataItem(int, const int64_t *, size_t, int, void *data, size_t size) {
  auto *item = new Item;
  if (data) item->data.assign(static_cast<char *>(data), static_cast<char *>(data) + size);
  return item;
}
// The queue still has it.
Status acltdtDestroyDataItem(Item *) { return 0; }
Status acltdtAddDataItem(Batch *batch, Item *item) {
  batch->push_back(item);
  return 0;
}
size_t acltdtGetDatasetSize(Batch *batch) { return batch ? batch->size() : 0; }
Status acltdtSendTensor(void *, Batch *batch, int) {
  {
    std::lock_guard<std::mutex> held(lock);
    queue.push_back(*batch);
  }
  queued.notify_one();
  return 0;
}
// Of the channels by which a device would send something: nothing comes, says MindSpore's number.
Status acltdtReceiveTensor(void *, void *, int) {
  usleep(100000);
  return 100006;
}
}
