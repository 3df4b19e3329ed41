// A test runner in a page: TEST registers, CHECK counts, main() in main.cc runs what the arguments name.
#pragma once

#include <atomic>
#include <cstdio>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

// What a sanitizer slows down is done less often under it.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<long> checks{0};
inline std::atomic<long> failures{0};

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline void report(const char* file, int line, const std::string& text) {
  if (failures.fetch_add(1) < 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  checks.fetch_add(1, std::memory_order_relaxed);
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  report(file, line, out.str());
}

inline void is_true(bool value, const char* text, const char* file, int line) {
  checks.fetch_add(1, std::memory_order_relaxed);
  if (!value) report(file, line, std::string(text) + " is false");
}

// Runs `action`, which has to throw an `Error`; returns what it said.
template <typename Error>
std::string thrown(const std::function<void()>& action, const char* text, const char* file, int line) {
  checks.fetch_add(1, std::memory_order_relaxed);
  try {
    action();
    report(file, line, std::string(text) + " throws nothing");
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    report(file, line, std::string(text) + " throws something else: " + error.what());
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace check

#define TEST(name)                                     \
  static void name();                                  \
  static const check::Register name##_registered(#name, name); \
  static void name()
#define CHECK(...) check::is_true(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
#define CHECK_EQUAL(a, b) check::equal(a, b, #a, __FILE__, __LINE__)
#define CHECK_THROWS(Error, ...) \
  check::thrown<Error>([&] { __VA_ARGS__; }, #__VA_ARGS__, __FILE__, __LINE__)
